"""The default world of a process: ``init`` joins it, ``finalize`` leaves it, ``current`` returns it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed import PrefixStore, Store

from mkernel import selection
from mkernel.errors import AlreadyInitialized, ArgumentError, NotInitialized
from mkernel.settings import Settings, check_timeout
from mkernel.settings import load as load_settings
from mkernel.world.handshake import world_key
from mkernel.world.identity import Backends, Identity
from mkernel.world.world import World


@dataclass
class _Default:
    """The world that ``init`` made, and how many it has made: each gets a key prefix of its own."""

    world: World | None = None
    generation: int = 0


_default = _Default()


def init(
    *,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    accelerator: str | None = None,
    nic: str | None = None,
    verbs: str | None = None,
    timeout_s: float | None = None,
    settings: Settings | None = None,
    stores: tuple[Store, Store] | None = None,
) -> World:
    """Join the world that this process was started for. Collective.

    Reads ``RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` as
    torchrun sets them; :func:`mkernel.launch` sets them too. Without them the world is this one
    process.

    Args:
        nodes: number of nodes; more than there are hosts splits each host into emulated nodes,
            whose ranks talk only through the NIC. Default: MKERNEL_NODES, else the hosts as found.
        ranks_per_node: checked against the world size where given.
        accelerator, nic, verbs: names of backends and provider, the same on all ranks; ``auto``: what
            this rank's machine has (:mod:`mkernel.selection`). Defaults: settings, which say ``auto``.
        timeout_s: deadline of every wait, in seconds.
        stores: two clients of one torch store (one for the watchdog); default: env:// rendezvous.

    Raises:
        AlreadyInitialized: this process is in a world. ArgumentError: the world size does not
        match nodes x ranks, or a job on several hosts has no MKERNEL_JOB_SECRET. UnknownBackend,
        BackendUnavailable. PlanMismatch: ranks were started with different options. Timeout: a rank
        did not come. PeerFailure: a rank failed. Untrusted: a stranger wrote to the store, or ranks
        have different secrets.
    """
    if _default.world is not None:
        raise AlreadyInitialized(
            "this process is already in a world; call mkernel.finalize() first"
        )
    settings = settings or load_settings()
    if timeout_s is not None:
        check_timeout("timeout_s", timeout_s)
        settings = settings.model_copy(update={"timeout_s": timeout_s})
    identity = _identity(nodes if nodes is not None else settings.nodes, ranks_per_node)
    backends = selection.backends(
        settings, identity.nodes, accelerator=accelerator, nic=nic, verbs=verbs
    )
    _default.generation += 1
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _default.world = join(
        identity,
        backends,
        settings,
        stores or _rendezvous(identity),
        f"mkernel/{restarts}/{_default.generation}",
    )
    return _default.world


def join(
    identity: Identity,
    backends: Backends,
    settings: Settings,
    stores: tuple[Store, Store],
    prefix: str,
) -> World:
    """Make a world that is nobody's default; a process may be in several. Collective.

    Args:
        stores: two clients of one store.
        prefix: of this world's keys there; no other world has it.

    Raises:
        The errors of :func:`init` about ranks that do not fit together.
    """
    one, two = (PrefixStore(prefix, store) for store in stores)
    key = world_key(
        one,
        identity.rank,
        identity.size,
        one_host=_environment_int("LOCAL_WORLD_SIZE", identity.size) >= identity.size,
        settings=settings,
    )
    return World(identity, backends, settings, (one, two), key)


def finalize(error: BaseException | None = None) -> None:
    """Leave the world and free all it holds; harmless without one.

    Args:
        error: why this rank stops early; the others then raise PeerFailure instead of waiting.
    """
    world, _default.world = _default.world, None
    if world is not None:
        world.close(error)


def synchronize() -> None:
    """Return once every call that this rank made is over, with the outputs there.

    Needed with stream-ordered accelerators only, and only to hear of a failure: what torch queues on
    the same stream sees the outputs anyway. Not collective.

    Raises:
        PeerFailure, Timeout, NicError, Untrusted, Cancelled: what broke one of the calls; every rank
        raises the same kind. NotInitialized.
    """
    current().synchronize()


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A row-major tensor in symmetric memory of the world's accelerator; its contents are zero.

    Collective: every rank, with the same shape and dtype, in the same order. Ops that take such a
    tensor (``out`` of :func:`mkernel.gemm_all_reduce`, ``gathered`` of
    :func:`mkernel.all_gather_gemm`) let peers write straight into it; every rank must then pass the
    same part of the same one.

    The memory is the world's: it is freed when the world has ended *and* the last tensor of it is
    gone, not before, since peers hold it too. Allocate once and reuse.

    Raises:
        ArgumentError: a shape without elements. Unsupported: the accelerator has no such memory.
        OSError: no memory. NotInitialized, PeerFailure, Timeout.
    """
    return current().empty(shape, dtype)


def current() -> World:
    """The world of this process. NotInitialized."""
    if _default.world is None:
        raise NotInitialized(
            "no world; call mkernel.init() first, or run inside mkernel.launch(...)"
        )
    return _default.world


def is_initialized() -> bool:
    """Whether this process is in a world."""
    return _default.world is not None


def _environment_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(name, repr(text), "an integer, as torchrun sets it") from None


def _identity(nodes: int | None, ranks_per_node: int | None) -> Identity:
    rank, size = _environment_int("RANK", 0), _environment_int("WORLD_SIZE", 1)
    if size < 1 or not 0 <= rank < size:
        raise ArgumentError("RANK", rank, f"0 to WORLD_SIZE - 1 = {size - 1}")
    per_host = _environment_int("LOCAL_WORLD_SIZE", size)
    if nodes is None:
        nodes = size // (ranks_per_node or per_host) or 1
    each = ranks_per_node or max(1, size // max(1, nodes))
    if nodes < 1 or nodes * each != size:
        raise ArgumentError(
            "nodes",
            nodes,
            f"nodes x ranks_per_node = WORLD_SIZE = {size}",
            why=f"{nodes} x {each} ranks = {nodes * each}",
        )
    return Identity(rank, nodes, each)


def _rendezvous(identity: Identity) -> tuple[Store, Store]:
    """Two store clients: requests of one client wait for each other, and the watchdog must not."""
    if identity.size == 1 and "MASTER_ADDR" not in os.environ:
        store = torch.distributed.HashStore()
        return store, store
    one, two = (
        next(torch.distributed.rendezvous("env://", identity.rank, identity.size))[0]
        for _ in range(2)
    )
    return one, two
