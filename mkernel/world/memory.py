"""A world's symmetric memory: signal pad, workspaces of plans, and tensors of :func:`mkernel.empty`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.backends.contracts.memory import PeerMemory, SymmetricMemory, Workspace
from mkernel.backends.contracts.nic import NicSession
from mkernel.backends.runtime.host_memory import HostPages
from mkernel.backends.transport import _transport
from mkernel.errors import ArgumentError, NicError
from mkernel.plan.model import LaunchPlan
from mkernel.plan.recent import Recent
from mkernel.world import symmetric
from mkernel.world.exchange import Exchange
from mkernel.world.failure import FailureMonitor
from mkernel.world.identity import Identity
from mkernel.world.symmetric import SymmetricBuffer

Place = tuple[int, int]
"""Where a tensor lies in symmetric memory: number of the buffer of ``empty``, offset in bytes."""

_kept_until_exit: list[object] = []
"""Memory of broken worlds whose calls did not end in time, and the backends that they run on."""


@dataclass
class PlanState:
    """What one plan holds in one world: symmetric workspace, same-node peers as kernels see them, first
    signal, and the number of calls so far."""

    buffer: SymmetricBuffer
    peers: Mapping[int, PeerMemory]
    signal_base: int
    epoch: int = 0


class SymmetricHeap:
    """All symmetric memory of one world; nothing of it is freed before the world ends.

    Joining fills in ``session``. What is allocated before, the pad, NICs write to by address only.
    """

    def __init__(
        self,
        identity: Identity,
        signals: int,
        accelerator: AcceleratorBackend,
        exchange: Exchange,
        failure: FailureMonitor,
    ) -> None:
        """``signals``: the capacity of the pad."""
        self._identity = identity
        self._signals = signals
        self._accelerator = accelerator
        self._exchange = exchange
        self._failure = failure
        self._regions = 0
        self._signals_taken = 0
        self._plans: dict[str, PlanState] = {}  # with memory or signals of their own
        self._sharing: Recent[str, PlanState] = Recent()  # with none: they can be adopted again
        self._shared: SymmetricBuffer | None = None
        self._host_only: SymmetricBuffer | None = None
        self._users: list[SymmetricBuffer] = []
        self._held = contextlib.ExitStack()
        self.session: NicSession | None = None
        self._pad = self._allocate(
            _transport.pad_bytes(signals),
            lambda memory: _transport.pad_format(memory.address, signals),
            HostPages(),
        )
        self.pad = self._pad.local.address

    def close(self, *, quiet: bool) -> None:
        """Free everything. Unless ``quiet``, kernels may still touch it: then it is kept until the
        process ends, and with it the accelerator backend."""
        if quiet:
            self._held.close()
        else:
            _kept_until_exit.append((self._held, self._accelerator))

    def _allocate(
        self,
        nbytes: int,
        prepare: Callable[[SymmetricMemory], None] = lambda memory: None,
        source: symmetric.Source | None = None,
    ) -> SymmetricBuffer:
        """A buffer until the end of the world, from the accelerator or another source. Collective."""
        region, self._regions = self._regions, self._regions + 1
        try:
            buffer = symmetric.allocate(
                region,
                nbytes,
                identity=self._identity,
                source=source or self._accelerator,
                session=self.session,
                exchange=self._exchange,
                prepare=prepare,
            )
        except (OSError, NicError):
            self._failure.look_for_abort()  # a peer that has failed takes its memory along
            raise
        self._held.callback(buffer.close)
        return buffer

    # ---- the users' tensors --------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """:func:`mkernel.empty` in this world. Collective."""
        sizes = tuple(int(size) for size in shape)
        if not sizes or min(sizes) < 1:
            raise ArgumentError("shape", sizes, "at least one dimension, each of at least 1")
        self._failure.raise_if_broken()
        buffer = self._allocate(math.prod(sizes) * dtype.itemsize)
        made = buffer.local.tensor(0, sizes, dtype)
        self._users.append(buffer)
        return made

    def places(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Place]:
        """By name, where those tensors lie that are in a buffer of ``empty``."""
        found = {}
        for name, tensor in tensors.items() if self._users else ():
            start, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            for number, buffer in enumerate(self._users):
                offset = start - buffer.local.address
                if offset >= 0 and offset + nbytes <= buffer.nbytes:
                    found[name] = (number, offset)
        return found

    def everywhere(self, place: Place) -> tuple[int, ...]:
        """Address in this process of each rank's piece of memory at a place; 0: there is none."""
        number, offset = place
        buffer = self._users[number]
        memories = {self._identity.rank: buffer.local, **buffer.peers}
        return tuple(
            memories[rank].address + offset if rank in memories else 0
            for rank in range(self._identity.size)
        )

    # ---- the plans' workspaces -----------------------------------------------------------------

    def of_plan(self, plan: LaunchPlan) -> PlanState:
        """What a plan holds. Its first call, on which all ranks agree, allocates it: collective."""
        digest = plan.digest()
        return self._plans.get(digest) or self._sharing[digest] or self._adopt(plan)

    def _adopt(self, plan: LaunchPlan) -> PlanState:
        needs = self._accelerator.workspace(plan)
        signals = self._signals_taken + needs.signals
        if signals > self._signals:
            raise ArgumentError(
                "MKERNEL_SIGNALS",
                self._signals,
                f"at least {signals} for the plans of this world",
            )
        base, self._signals_taken = self._signals_taken, signals
        buffer = self._workspace(needs)
        peers = {
            rank: PeerMemory(self._pad.peers[rank].address, memory.address)
            for rank, memory in buffer.peers.items()
        }
        state = PlanState(buffer, peers, base)
        own = needs.signals or (needs.nbytes and not needs.shared)
        kept = self._plans if own else self._sharing
        kept[plan.digest()] = state
        return state

    def _workspace(self, needs: Workspace) -> SymmetricBuffer:
        """Memory for a plan: its own, or what the world's plans share. The latter doubles where it is
        too small, so that all that earlier plans keep is no more than the newest."""
        if not needs.shared and needs.nbytes == 0:  # it is still how peers' pads are known
            self._host_only = self._host_only or self._allocate(1, source=HostPages())
            return self._host_only
        if not needs.shared:
            return self._allocate(needs.nbytes, self._accelerator.format)
        nbytes = max(1, needs.nbytes)  # a world of one needs none
        if self._shared is None or self._shared.nbytes < nbytes:
            before = 0 if self._shared is None else self._shared.nbytes
            self._shared = self._allocate(max(nbytes, 2 * before), self._accelerator.format)
        return self._shared
