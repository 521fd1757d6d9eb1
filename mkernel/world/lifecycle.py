"""The worlds of a process: ``init`` makes one, ``finalize`` leaves it, ``current`` finds it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, overload

import torch
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh

from mkernel import machine, selection
from mkernel.backends import registry
from mkernel.errors import AlreadyInitialized, ArgumentError, NotInitialized, Unsupported
from mkernel.plan.invariance import Invariant, Wanted, encoded
from mkernel.plan.mixed import JOINT, Shards
from mkernel.settings import AUTO, Settings, check_timeout
from mkernel.settings import load as load_settings
from mkernel.world import environment, exposition, groups
from mkernel.world.environment import Started
from mkernel.world.groups import Group
from mkernel.world.handshake import world_key
from mkernel.world.identity import Backends, Identity
from mkernel.world.join_deadline import JoinDeadline
from mkernel.world.process_group import has_users_default
from mkernel.world.registry import worlds
from mkernel.world.statistics import Statistics
from mkernel.world.world import World

STARTED = "mkernel:"
"""The beginning of the names of worlds that were made of the ranks that a launcher started."""

_SILENT = "the ranks of a world did not meet in the store, which may not answer,"


def _without_ops(world: World, path: Path) -> None:
    raise NotInitialized(f"plans {path} are of ops, which are not imported: import mkernel.ops")


load_plans: Callable[[World, Path], None] = _without_ops
"""Makes a world know the calls of a file of plans; :mod:`mkernel.ops`, which is above, sets it."""

generations: Counter[str] = Counter()
"""Counts the worlds that this process has made of a group, by its name: each has its own key prefix."""


def init(
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    accelerator: str | Sequence[str] | None = None,
    nic: str | None = None,
    verbs: str | None = None,
    timeout_s: float | None = None,
    join_timeout_s: float | None = None,
    invariant: Wanted = None,
    settings: Settings | None = None,
    stores: tuple[Store, Store] | None = None,
) -> World:
    """Make a world of the ranks of a group, or of all ranks. Collective among these.

    A process may be in several worlds, which may end in any order. The first is the default of ops.
    Ranks that share several worlds make them in one order, and call them in one order, as with
    NCCL's communicators.

    Args:
        group: the world's ranks, in the order of the group. None: all ranks, as torch.distributed
            knows them where it is initialized; else as the environment tells: ``RANK``, ``WORLD_SIZE``,
            ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` as torchrun sets them, else
            what SLURM's ``srun`` sets; else the world is this one process.
        nodes: number of nodes; more than there are hosts splits each host into emulated nodes,
            whose ranks talk only through the NIC. Default: the hosts as found, each split as
            MKERNEL_NODES splits the whole job. Every node has as many ranks.
        ranks_per_node: checked against the world size where given.
        accelerator, nic, verbs: names of backends and provider, the same on all ranks; ``auto``: what
            this rank's machine has (:mod:`mkernel.selection`). Defaults: settings, which say ``auto``.
            An accelerator that is named is the world's only one. Several, ``"hopper,streams"`` or a
            sequence, run each op on the first that provides it, and so does ``auto`` where the one it
            prefers lacks ops. Companions take part from the first call that one of them runs.
            ``"hopper+streams"``: unlike nodes, an equal number of each in this order, as ``nic`` may
            be ``"cx7+efa"``; ranks whose nodes choose different ones make such a world too
            (:mod:`mkernel.plan.mixed`). Nodes with unlike NICs are joined by TCP.
        timeout_s: deadline of every wait, in seconds.
        join_timeout_s: how long this call takes at most, in seconds, however late or silent others are.
        invariant: promise of all ops that a row's bits depend on that row and the weights alone
            (docs/invariance.md), the same on all ranks; True: with MKERNEL_INVARIANT_SEGMENTS. Ops
            of which the accelerator does not promise it are refused by name. Default: the setting
            MKERNEL_INVARIANT.
        stores: two clients of one torch store (one for the watchdog); default: env:// rendezvous.

    Raises:
        AlreadyInitialized: this process is in a world of that group, or, without ``group``, in a
            default one.
        ArgumentError: this rank is not in the group; the number of ranks does not match nodes x ranks,
            or hosts have different numbers of them; a job on several hosts has no MKERNEL_JOB_SECRET.
        UnknownBackend, BackendUnavailable: a backend is not installed, or cannot run here.
        PlanMismatch: ranks were started with different options.
        InputFileError: MKERNEL_PLANS names a file that a rank cannot read, or that was made for another
            world.
        Timeout: a rank did not come, or the store did not answer.
        PeerFailure: a rank failed.
        Unsupported: Python runs without its global interpreter lock.
        Untrusted: a stranger wrote to the store, or ranks have different secrets.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise Unsupported(
            "mkernel needs Python's global interpreter lock, which this free-threaded Python runs "
            "without; start it with PYTHON_GIL=1"
        )
    if group is None and worlds.default is not None:
        raise AlreadyInitialized(
            "this process is already in a world; call mkernel.finalize() first, or pass group= to make "
            "another one beside it"
        )
    default = worlds.default
    settings = settings or (load_settings() if default is None else default.settings)
    named = {name: each for name, each in (("nic", nic), ("verbs", verbs)) if each}
    settings = settings.model_copy(update=named) if named else settings
    for limit, seconds in (("timeout_s", timeout_s), ("join_timeout_s", join_timeout_s)):
        if seconds is not None:
            check_timeout(limit, seconds)
            settings = settings.model_copy(update={limit: seconds})
    if encoded(invariant) is not None:
        more: dict[str, object] = {"invariant": bool(invariant)}
        if isinstance(invariant, Invariant):
            more["invariant_segments"] = invariant.segments
            more["invariant_partial_dtype"] = invariant.partial_dtype
        settings = settings.model_copy(update=more)
    Invariant(settings.invariant_segments, settings.invariant_partial_dtype)  # or ArgumentError
    if default is not None:
        accelerator = accelerator or default.backends.accelerators
        nic, verbs = nic or default.backends.nic, verbs or default.backends.verbs
    wanted = _Wanted(nodes, ranks_per_node, accelerator, nic, verbs, environment.chosen())
    if group is None and (stores is not None or not has_users_default()):
        world = _of_job(wanted, settings, stores)
    else:
        of = groups.process_group(group or torch.distributed.group.WORLD)
        world = _of_group(of, wanted, settings)
    if settings.plans is not None and worlds.default is world:
        try:
            load_plans(world, settings.plans)
        except BaseException as error:
            world.close(error)
            raise
    return world


class _Wanted(NamedTuple):
    """The wishes of a caller of :func:`init`, and the device that it uses."""

    nodes: int | None
    ranks_per_node: int | None
    accelerator: str | Sequence[str] | None
    nic: str | None
    verbs: str | None
    device: environment.Chosen | None

    def backends(self, settings: Settings, identity: Identity, *, by_host: bool) -> Backends:
        given, place = self.accelerator or settings.accelerator, (identity.node, identity.nodes)
        return selection.backends(
            settings,
            identity.nodes,
            by_host=by_host,
            accelerator=selection.of_node("accelerator", given, *place),
            nic=selection.of_node("nic", self.nic or settings.nic, *place),
            verbs=self.verbs,
            ranks=identity.size,
        )

    def together(self, settings: Settings, ranks: int | None) -> int | None:
        """Return how many ranks of a host are a node, where they do not all reach each other's memory
        and the caller leaves the nodes open; else None. ``ranks``: of a host; None: one a device."""
        if self.nodes or self.ranks_per_node or settings.nodes:
            return None
        return ranks_together(self.accelerator, ranks, settings)


def ranks_together(
    accelerator: str | Sequence[str] | None, ranks: int | None, settings: Settings
) -> int | None:
    """Return :func:`mkernel.machine.ranks_together` of the accelerator that a user names, or of the
    setting's, the first where they are several. None: all of them, or unlike nodes are named."""
    given = accelerator or settings.accelerator
    if ranks == 1 or JOINT in given:
        return None
    name, *_ = selection.accelerator_names(given)
    name = selection.chosen_accelerator() if name == AUTO else name
    return machine.ranks_together(registry.accelerator(name), ranks, settings)


def _of_job(wanted: _Wanted, settings: Settings, stores: tuple[Store, Store] | None) -> World:
    """Make the world of all ranks that a launcher started."""
    job = environment.started()
    nodes = settings.nodes if wanted.nodes is None else wanted.nodes
    each = wanted.together(settings, min(job.per_host, job.size))
    identity = _identity(job, nodes, wanted.ranks_per_node or each)
    by_host = each is not None and job.per_host >= job.size
    backends = wanted.backends(settings, identity, by_host=by_host)
    name = f"{STARTED}{generations[STARTED]}"
    deadline = JoinDeadline(settings.join_timeout_s)
    with worlds.joining(name):
        prefix = _prefix(STARTED)
        world = _join(
            identity,
            backends,
            settings,
            stores or environment.rendezvous(job, deadline),
            prefix,
            name,
            wanted.device,
            deadline,
        )
        worlds.add(world, default=True)
    return world


def _of_group(group: ProcessGroup, wanted: _Wanted, settings: Settings) -> World:
    """Make the world of a process group's ranks."""
    name, rank, size = group.group_name, group.rank(), group.size()
    deadline = JoinDeadline(settings.join_timeout_s)
    with worlds.joining(name):
        prefix = _prefix(name)
        part, split = _part(settings, wanted)

        def meet() -> tuple[tuple[Store, Store], bytes, list[tuple[str, int]]]:
            one, two = (PrefixStore(prefix, store) for store in groups.stores(group))
            waits = _of_join(settings, deadline)
            key = world_key(one, rank, size, name=name, one_host=None, settings=waits)
            limit_s = deadline.wait_s(settings.timeout_s)
            return (one, two), key, groups.meet(one, key, rank, size, part, limit_s)

        stores, key, met = deadline.within(_SILENT, meet)
        found = groups.nodes(met, groups.global_ranks(group))
        identity = _identity(
            Started(rank, size, size // found, None), wanted.nodes, wanted.ranks_per_node
        )
        by_host = split and len({host for host, _ in met}) == 1
        backends = wanted.backends(settings, identity, by_host=by_host)
        world = World(identity, backends, settings, stores, key, name, wanted.device, deadline)
        worlds.add(world, default=True)
    return world


def _of_join(settings: Settings, deadline: JoinDeadline) -> Settings:
    """Return the settings with waits that are no longer than the join has time for."""
    return settings.model_copy(update={"timeout_s": deadline.wait_s(settings.timeout_s)})


def _part(settings: Settings, wanted: _Wanted) -> tuple[int, bool]:
    """Return the emulated node that this rank is on, where the hosts of its job are split, and whether
    they are because devices do not reach each other's memory."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    nodes = settings.nodes
    job = worlds.default
    if nodes is None and job is not None and job.size == size:  # its nodes may be emulated ones
        nodes = job.identity.nodes
    if nodes is None:
        each = wanted.together(settings, None)
        return (0, False) if each is None else (rank // each, True)
    if size % nodes:
        raise ArgumentError("MKERNEL_NODES", nodes, f"a divisor of {size}, the number of ranks")
    return rank // (size // nodes), False


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
        prefix: of this world's keys there; no other world has it. It is the world's name too.

    Raises:
        The errors of :func:`init` about ranks that do not fit together.
    """
    deadline = JoinDeadline(settings.join_timeout_s)
    with worlds.joining(prefix):
        chosen = environment.chosen()
        world = _join(identity, backends, settings, stores, prefix, prefix, chosen, deadline)
        worlds.add(world, default=False)
    return world


def _join(
    identity: Identity,
    backends: Backends,
    settings: Settings,
    stores: tuple[Store, Store],
    prefix: str,
    name: str,
    device: environment.Chosen | None,
    deadline: JoinDeadline,
) -> World:
    one, two = (PrefixStore(prefix, store) for store in stores)
    one_host = environment.started().per_host >= identity.size
    key = deadline.within(
        _SILENT,
        lambda: world_key(
            one,
            identity.rank,
            identity.size,
            name=name,
            one_host=one_host,
            settings=_of_join(settings, deadline),
        ),
    )
    return World(identity, backends, settings, (one, two), key, name, device, deadline)


def _prefix(name: str) -> str:
    """Make the prefix of the keys of the next world of that group, which no world had before."""
    generations[name] += 1
    return f"mkernel/{environment.restarts()}/{generations[name]}"


def _identity(job: Started, nodes: int | None, ranks_per_node: int | None) -> Identity:
    if nodes is None:
        nodes = job.size // (ranks_per_node or job.per_host) or 1
    each = ranks_per_node or max(1, job.size // max(1, nodes))
    if nodes < 1 or nodes * each != job.size:
        raise ArgumentError(
            "nodes",
            nodes,
            f"nodes x ranks_per_node = WORLD_SIZE = {job.size}",
            why=f"{nodes} x {each} ranks = {nodes * each}",
        )
    return Identity(job.rank, nodes, each)


def finalize(error: BaseException | None = None, *, group: Group = None) -> None:
    """Leave a group's world and free all it holds; without ``group`` leave every world of this process,
    the newest first. Harmless without one. Collective among the ranks of each.

    Args:
        error: why this rank stops early; the others then raise PeerFailure instead of waiting.

    Raises:
        NotInitialized: there is no world of that group.
        WorldError: what broke a call that was only queued, where nothing raised it before; the other
            worlds have ended all the same.
    """
    _close(worlds.all() if group is None else [current(group)], error)


def _close(ending: list[World], error: BaseException | None) -> None:
    """Close these worlds in turn, also those after one that raises."""
    if ending:
        try:
            ending.pop(0).close(error)
        finally:
            _close(ending, error)


def synchronize(group: Group = None) -> None:
    """Wait until every call that this rank made in a world is over, with the outputs there, those of
    replayed CUDA graphs too.

    Needed with stream-ordered accelerators only, and only to hear of a failure: what torch queues on
    the same stream sees the outputs anyway. Not collective.

    Args:
        group: names the world; None: the default one.

    Raises:
        PeerFailure, Timeout, NicError, Untrusted, Cancelled: what broke one of the calls; every rank
            raises the same kind.
        NotInitialized: there is no such world.
    """
    current(group).synchronize()


@overload
def stats(group: Group = None, *, format: None = None) -> Statistics: ...
@overload
def stats(group: Group = None, *, format: Literal["prometheus"]) -> str: ...
def stats(group: Group = None, *, format: Literal["prometheus"] | None = None) -> Statistics | str:
    """Return statistics of this rank's calls of a world so far: calls by op, bytes sent by way, new
    shapes, waits of the host, commands that the NIC could not take at once, errors. Not collective.

    Args:
        group: names the world; None: the default one.
        format: ``"prometheus"``: return text for a Prometheus server instead, with more detail, of the
            group's world or, where none is named, of every world of this process, if there is any.

    Raises:
        NotInitialized: there is no such world. ArgumentError: there is no such format.
    """
    if format is None:
        return current(group).statistics()
    if format != "prometheus":
        raise ArgumentError("format", repr(format), "'prometheus', or None")
    every = worlds.all()
    return exposition.text(len(every), every if group is None else [current(group)])


def empty(shape: Sequence[int], dtype: torch.dtype, group: Group = None) -> torch.Tensor:
    """Allocate a row-major tensor in symmetric memory of a world's accelerator; its contents are zero.

    Collective: every rank, with the same shape and dtype, in the same order. Ops that take such a
    tensor (``out`` of :func:`mkernel.gemm_all_reduce`, ``gathered`` of
    :func:`mkernel.all_gather_gemm`) let peers write straight into it; every rank must then pass the
    same part of the same one. For ops of other worlds it is a tensor like any other.

    The memory is the world's: it is freed when the world has ended *and* the last tensor of it is
    gone, not before, since peers hold it too. Allocate once and reuse.

    Args:
        group: names the world; None: the default one.

    Raises:
        ArgumentError: a shape without elements, or that is no sequence of sizes.
        DtypeError: ``dtype`` is no dtype of torch's. Unsupported: the accelerator has no such memory.
        OSError: no memory. NotInitialized, PeerFailure, Timeout.
    """
    return current(group).empty(shape, dtype)


def shard(
    size: int,
    shards: Shards = "even",
    *,
    multiple_of: int = 1,
    group: Group = None,
) -> slice:
    """Return this rank's part of a dimension that ranks may share unevenly where nodes are unlike: K of
    GEMM+AllReduce and GEMM+ReduceScatter, columns of B of AllGather+GEMM. Not collective.

    Rows may be too (``shards`` of the ops). In worlds of one kind of node everything is shared evenly.
    Ranks of a node have equal parts.

    Args:
        size: of the dimension, all ranks together.
        shards: ``even``; ``speed``: in proportion to what the constants of each node's accelerator
            predict of products in float16 (MKERNEL_CONSTANTS may be a file of each node's own); or the
            size of a rank's part, by node.
        multiple_of: each part is a multiple of it, at least one.
        group: names the world; None: the default one.

    Raises:
        ArgumentError: the dimension cannot be cut so. Unsupported: uneven shares in a world of one kind
            of node, or no constants of some node. NotInitialized: there is no such world.
    """
    world = current(group)
    return world.part(world.shares(size, shards, multiple_of))


def graph_pool(group: Group = None) -> tuple[int, int] | None:
    """Make a pool of a CUDA graph's memory, for ``torch.cuda.graph(graph,
    pool=mkernel.graph_pool())``: outputs that ops of a world allocate while the graph is captured then
    lie where peers put their results straight into them, as those of eager calls do. With torch's own
    pool they are copied there at the end of each call. The result is the same. Not collective.

    Graphs may share one as they may share ``torch.cuda.graph_pool_handle()``. All that is captured
    takes memory of it, and where it is full, ordinary memory. ``MKERNEL_HOPPER_OUTPUTS`` says how large
    it is.

    Args:
        group: names the world; None: the default one.

    Returns:
        What ``torch.cuda.graph`` takes as ``pool``; None where the world's accelerator has no memory
        for outputs of its own, which is torch's own choice too.

    Raises:
        NotInitialized: there is no such world.
    """
    return current(group).graph_pool()


def current(group: Group = None) -> World:
    """Find the world that ``group`` names in this process; None: the default one.

    Raises:
        NotInitialized: there is none. ArgumentError: ``group`` cannot name one.
    """
    if group is None:
        return worlds.default or worlds.the_default()
    if isinstance(group, World):
        if group.ended:
            raise NotInitialized(f"world {group.name!r} has ended; make a new one")
        return group
    return worlds.named(group if isinstance(group, str) else groups.process_group(group).group_name)


def is_initialized(group: Group = None) -> bool:
    """Return whether this process is in a world of a group; None: in a default one."""
    try:
        current(group)
    except NotInitialized:
        return False
    return True
