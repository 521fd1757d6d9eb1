"""A world's symmetric memory: signal pad, what its plans share, tensors of :func:`mkernel.empty`."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mkernel import log
from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.backends.contracts.memory import PeerMemory, SymmetricMemory
from mkernel.backends.contracts.nic import NicSession
from mkernel.backends.runtime.host_memory import HostPages, page_up
from mkernel.backends.transport import _transport
from mkernel.errors import ArgumentError, DtypeError, NicError, PeerFailure, Unsupported
from mkernel.plan.model import LaunchPlan
from mkernel.plan.two_generation_cache import TwoGenerationCache
from mkernel.world.exchange import Board, Exchange, board_bytes, native_board
from mkernel.world.failure import FailureMonitor
from mkernel.world.identity import Identity

if TYPE_CHECKING:
    from mkernel.backends.runtime._calls import CallPath


class Source(Protocol):
    """A source of memory: an accelerator backend, or the host's own pages."""

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Allocate zeroed memory that peers of the node can map."""

    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map what a same-node peer exported."""


@dataclass(frozen=True)
class SymmetricBuffer:
    """One rank's view of a buffer. ``peers``: same-node ranks' memory, mapped here; ``region``: number
    for NIC puts; ``nbytes`` is the same on every rank."""

    region: int
    nbytes: int
    local: SymmetricMemory
    peers: Mapping[int, SymmetricMemory]

    def close(self) -> None:
        """Unmap the peers' memory and free the own. The NIC must have let go of it before."""
        for memory in (*self.peers.values(), self.local):
            memory.close()


def allocate(
    region: int,
    nbytes: int,
    *,
    identity: Identity,
    source: Source,
    session: NicSession | None,
    exchange: Exchange,
    prepare: Callable[[SymmetricMemory], None] = lambda memory: None,
) -> SymmetricBuffer:
    """Allocate, exchange and connect one buffer. Collective: every rank, in the same order.

    A same-node peer gets the descriptor that maps the memory; a rank of another node gets a NIC key and
    nothing else, so it has no other way to the bytes.

    Args:
        prepare: called with the own memory before any peer can reach it.

    Raises:
        Timeout: a rank did not take part. PeerFailure: one is gone. OSError: no memory.
    """
    rank, own = identity.rank, identity.node
    near = [r for r, node in enumerate(identity.node_of) if node == own and r != rank]
    far = [r for r, node in enumerate(identity.node_of) if node != own]
    with contextlib.ExitStack() as undo:
        local = source.allocate(nbytes)
        undo.callback(local.close)
        prepare(local)
        if session is not None:
            key = _register(session, region, local, nbytes)
            exchange.publish(f"region/{region}/nic/{rank}", key)
        exchange.publish(f"region/{region}/node{own}/{rank}", local.export())

        peers: dict[int, SymmetricMemory] = {}
        told = exchange.collect(f"region/{region}/node{own}", near)
        for peer in near:
            try:
                peers[peer] = source.attach(told[peer])
            except (FileNotFoundError, ProcessLookupError) as error:  # before the watchdog saw it
                raise gone_before_mapped(peer, error) from error
            undo.callback(peers[peer].close)
        if session is not None:
            keys = exchange.collect(f"region/{region}/nic", far)
            for peer in far:
                session.bind(region, peer, keys[peer])
        # A peer may put here as soon as it has the key; it must not before all are bound, so that
        # a failure above leaves nobody writing into freed memory.
        exchange.gather("ready", True)
        undo.pop_all()
    for which in ("nic", f"node{own}"):  # all have read them
        exchange.forget(f"region/{region}/{which}/{rank}")
    return SymmetricBuffer(region, nbytes, local, peers)


def gone_before_mapped(peer: int, error: OSError) -> PeerFailure:
    """Return the error of a rank whose memory can no longer be mapped."""
    text = (
        f"rank {peer} died, or ended its world, before its memory was mapped ({error}); look at its "
        "own output"
    )
    return PeerFailure(text, peer)


def _register(session: NicSession, region: int, memory: SymmetricMemory, nbytes: int) -> str:
    """Register host or device memory with the NIC, and return its key."""
    try:
        dmabuf = memory.dmabuf()
    except OSError:
        dmabuf = -1  # the NIC may have another way to it
    if dmabuf is None:
        return session.register(region, memory.address, nbytes)
    try:
        return session.register_device(region, memory.address, nbytes, dmabuf, flush=memory.flush())
    finally:
        if dmabuf >= 0:
            os.close(dmabuf)


Place = tuple[int, int]
"""The place of a tensor in symmetric memory: number of the buffer of ``empty``, offset in bytes."""

_kept_until_exit: list[object] = []
"""Memory of broken worlds whose calls did not end in time, and the backends that they run on."""


class Arena:
    """Symmetric memory that plans of a world share: areas, one after another. ``peers``: the other
    ranks of the node as kernels see them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Lay out areas of ``sizes`` bytes; ``offsets`` says where they lie, in bytes."""
        self.sizes = tuple(sizes)
        ends = [*itertools.accumulate(page_up(size) for size in sizes)]
        self.offsets = (0, *ends[:-1])
        self.nbytes = max(1, self.offsets[-1] + self.sizes[-1])

    buffer: SymmetricBuffer
    peers: Mapping[int, PeerMemory]

    def holds(self, areas: Sequence[int]) -> bool:
        """Return whether a plan that needs these areas has room."""
        return len(areas) <= len(self.sizes) and all(map(int.__le__, areas, self.sizes))

    def larger(self, areas: Sequence[int]) -> Arena:
        """Return an arena that also holds these areas. It is at least twice as large, so that all that
        earlier plans keep is no more than the newest."""
        pairs = itertools.zip_longest(self.sizes, areas, fillvalue=0)
        sizes = [max(need, 2 * size if need > size else size) for size, need in pairs]
        least, total = 2 * sum(self.sizes), sum(sizes)
        return Arena([max(size, -(-size * least // total)) for size in sizes])


@dataclass(frozen=True)
class PlanMemory:
    """The memory that calls of one plan use in one world: arena and staging memory, where it needs
    them, and same-node peers as kernels see them. ``outputs``: the backend has memory for theirs."""

    arena: Arena | None
    staging: SymmetricBuffer | None
    peers: Mapping[int, PeerMemory]
    outputs: bool = False

    @property
    def region(self) -> int:
        """Return the number of the buffer that NICs read and write; 0: there is none."""
        if self.staging is not None:
            return self.staging.region
        return self.arena.buffer.region if self.arena else 0


class _Staging:
    """Source of staging memory. Peers of the node have no use for it; that it is exported to them is
    what makes it symmetric."""

    def __init__(self, accelerator: AcceleratorBackend) -> None:
        self.allocate = accelerator.allocate_staging
        self.attach = HostPages().attach


class _Found:
    """Source of one allocation, which was made before: ``memory``, None where there was not so much.
    What was not taken is freed at the end."""

    def __init__(self, accelerator: AcceleratorBackend, nbytes: int) -> None:
        self.attach = accelerator.attach
        self.memory: SymmetricMemory | None = None
        with contextlib.suppress(OSError):
            self.memory = accelerator.allocate(nbytes)

    def allocate(self, nbytes: int) -> SymmetricMemory:
        taken, self.memory = self.memory, None
        assert taken is not None
        return taken

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()


class SymmetricHeap:
    """All symmetric memory of one engine of a world; nothing of it is freed before the world ends.

    Joining fills in ``session`` and ``staged``. What is allocated before, the pad, NICs write to by
    address only.

    Attributes:
        pad: address of the rank's own.
        board: by which ranks compare digests; None: some are on other nodes.
        held_bytes: what is allocated, by use, without the pad, whose pages are there once used.
        staged: NICs do not reach the accelerator's memory; they get staging memory instead.
    """

    def __init__(
        self,
        identity: Identity,
        accelerator: AcceleratorBackend,
        exchange: Exchange,
        failure: FailureMonitor,
        regions: Iterator[int],
    ) -> None:
        """Allocate the pad. ``regions``: numbers of the world's buffers, the same on every rank."""
        self._identity = identity
        self._accelerator = accelerator
        self._exchange = exchange
        self._failure = failure
        self._regions = regions
        self._plans: TwoGenerationCache[str, PlanMemory] = (
            TwoGenerationCache()
        )  # one that is not kept is adopted again
        self._arena: Arena | None = None  # the newest
        self._staging: SymmetricBuffer | None = None  # likewise
        self._outputs: SymmetricBuffer | None = None  # the newest range of them
        self._takes_outputs = True
        self._users: list[SymmetricBuffer] = []
        self._known: CallPath | None = None
        self._held = contextlib.ExitStack()
        self.held_bytes: Counter[str] = Counter()
        self.session: NicSession | None = None
        self.staged = False
        # As many counters as can be named: host pages that nobody touches take no memory. Behind them
        # lies the rank's board.
        pad_bytes = _transport.pad_bytes(_transport.MOST_SIGNALS)
        self._pad = self._allocate(
            pad_bytes + board_bytes(),
            None,
            lambda memory: _transport.pad_format(memory.address, _transport.MOST_SIGNALS),
            HostPages(),
        )
        self.pad = self._pad.local.address
        self._peers = self._with_workspaces({})
        self.board: Board | None = None
        made = native_board()
        if identity.nodes == 1 and made is not None:
            pads = {identity.rank: self._pad.local, **self._pad.peers}
            boards = {rank: pads[rank].address + pad_bytes for rank in sorted(pads)}
            self.board = Board(made, boards, failure)

    def close(self, *, quiet: bool) -> None:
        """Free everything. Unless ``quiet``, kernels may still touch it: then it is kept until the
        process ends, and with it the accelerator backend."""
        self.session = None
        if quiet:
            self._held.close()
        else:
            _kept_until_exit.append((self._held, self._accelerator))

    def _allocate(
        self,
        nbytes: int,
        use: str | None,
        prepare: Callable[[SymmetricMemory], None] = lambda memory: None,
        source: Source | None = None,
    ) -> SymmetricBuffer:
        """Allocate a buffer, until the end of the world, from the accelerator or another source.
        Collective. ``use``: under which it is counted; None: it is not."""
        region = next(self._regions)
        unreached = self.staged and source is None
        try:
            buffer = allocate(
                region,
                nbytes,
                identity=self._identity,
                source=source or self._accelerator,
                session=None if unreached else self.session,
                exchange=self._exchange,
                prepare=prepare,
            )
        except (OSError, NicError, PeerFailure):
            self._failure.look_for_abort()  # a peer that has failed takes its memory along
            raise
        self._held.callback(buffer.close)
        if use is not None:
            self.held_bytes[use] += nbytes
            told = log.of_world(__name__, self._identity.rank, self._failure.world)
            told.debug("holds %d bytes more of symmetric memory for %s", nbytes, use)
        return buffer

    # ---- the users' tensors --------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor as :func:`mkernel.empty` does, in this world. Collective."""
        try:
            sizes = tuple(map(operator.index, shape))
        except TypeError:
            sizes = ()
        if not sizes or min(sizes) < 1:
            legal = "a sequence of sizes, such as (4, 8): one dimension or more, each of at least 1"
            raise ArgumentError("shape", repr(shape), legal)
        if not isinstance(dtype, torch.dtype):
            raise DtypeError("dtype", repr(dtype), "a torch.dtype")
        self._failure.raise_if_broken()
        buffer = self._allocate(math.prod(sizes) * dtype.itemsize, "tensors")
        made = buffer.local.tensor(0, sizes, dtype)
        self._users.append(buffer)
        if self._known is not None:
            self._known.add_buffer(buffer.local.address, buffer.nbytes)
        return made

    def watched_by(self, known: CallPath) -> None:
        """Tell ``known`` of users' buffers, and when plans are forgotten. Call before there are any."""
        self._known = known
        self._plans.forgets = known.forget

    def places(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Place]:
        """Map the name of each tensor that lies in a buffer of ``empty`` to its place."""
        found = {}
        for name, tensor in tensors.items() if self._users else ():
            start, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            for number, buffer in enumerate(self._users):
                offset = start - buffer.local.address
                if offset >= 0 and offset + nbytes <= buffer.nbytes:
                    found[name] = (number, offset)
        return found

    def everywhere(self, place: Place) -> tuple[int, ...]:
        """Return the addresses, here, of all ranks' pieces of memory at a place; 0: there is none."""
        number, offset = place
        buffer = self._users[number]
        memories = {self._identity.rank: buffer.local, **buffer.peers}
        return tuple(
            memories[rank].address + offset if rank in memories else 0
            for rank in range(self._identity.size)
        )

    # ---- what plans share ----------------------------------------------------------------------

    def has_outputs(self, plan: LaunchPlan) -> bool:
        """Return whether the backend has memory for outputs of a plan's calls, which it has not before
        the first of them. Any thread: this does not count as a use of the plan, and the order of uses
        is the same on every rank."""
        memory = self._plans.get(plan.digest())
        return memory is not None and memory.outputs

    def of_plan(self, plan: LaunchPlan) -> PlanMemory:
        """Return the memory that a plan's calls use, and allocate what is missing. Collective where
        that is more than any plan before needed; all ranks agree on the plan first."""
        digest = plan.digest()
        return self._plans[digest] or self._adopt(plan, digest)

    def _adopt(self, plan: LaunchPlan, digest: str) -> PlanMemory:
        needs = self._accelerator.workspace(plan)
        if needs.signals > _transport.MOST_SIGNALS:
            raise Unsupported(
                f"a plan of {plan.op} with {plan.shape} needs {needs.signals} signals, and a signal "
                f"pad has {_transport.MOST_SIGNALS}, as many as a NIC's immediate can name; cut it "
                "in larger chunks or tiles"
            )
        arena = self._arena_for(needs.areas) if needs.areas else None
        staging = self._staging_for(needs.staging) if needs.staging else None
        if needs.outputs:
            self._add_outputs(needs.outputs)
        peers = arena.peers if arena else self._peers
        made = PlanMemory(arena, staging, peers, outputs=needs.outputs > 0)
        self._plans[digest] = made
        return made

    def _arena_for(self, areas: Sequence[int]) -> Arena:
        if self._arena is None or not self._arena.holds(areas):
            arena = Arena(areas) if self._arena is None else self._arena.larger(areas)
            arena.buffer = self._allocate(arena.nbytes, "workspace", self._accelerator.format)
            arena.peers = self._with_workspaces(arena.buffer.peers)
            self._arena = arena
        return self._arena

    def _with_workspaces(self, mapped: Mapping[int, SymmetricMemory]) -> dict[int, PeerMemory]:
        """Return same-node ranks as kernels see them, with their part of an arena; 0: none."""
        return {
            rank: PeerMemory(pad.address, mapped[rank].address if mapped else 0)
            for rank, pad in self._pad.peers.items()
        }

    def _add_outputs(self, nbytes: int) -> None:
        """Add one more range, if needed and if every rank has memory for it: calls can do without."""
        enough = self._outputs is not None and self._outputs.nbytes >= nbytes
        if enough or not self._takes_outputs:
            return
        larger = max(nbytes, 2 * self._outputs.nbytes if self._outputs else 0)
        with contextlib.closing(_Found(self._accelerator, larger)) as found:
            self._takes_outputs = all(
                self._exchange.gather("outputs", found.memory is not None).values()
            )
            if not self._takes_outputs:
                return
            self._outputs = made = self._allocate(larger, "outputs", source=found)
        memories = {self._identity.rank: made.local, **made.peers}
        everywhere = {rank: memory.address for rank, memory in memories.items()}
        self._takes_outputs = self._accelerator.add_outputs(made.local, everywhere)

    def _staging_for(self, nbytes: int) -> SymmetricBuffer:
        if self._staging is None or self._staging.nbytes < nbytes:
            larger = max(nbytes, 2 * self._staging.nbytes if self._staging else 0)
            self._staging = self._allocate(larger, "staging", source=_Staging(self._accelerator))
        return self._staging
