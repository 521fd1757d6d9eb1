"""A world: the ranks that call ops together, and what they share.

Building one goes bootstrap → topology → symmetric signal pad → NIC session. The world owns
symmetric memory, signal numbers, epochs and failure handling; backends only run kernels and move
bytes.
Several worlds may follow one another in one process (``mkernel.world.lifecycle``).

A call of a stream-ordered backend is under way when ``run`` returns; what breaks it surfaces at the
next call, in ``synchronize`` or in ``close``.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.distributed import Store

from mkernel import machine
from mkernel.backends import registry
from mkernel.backends.contracts import instrumented
from mkernel.backends.contracts.accelerator import AcceleratorBackend, Call, Launch
from mkernel.backends.contracts.instrumented import Instrumented, LaunchTimes, View
from mkernel.backends.contracts.memory import PeerMemory, SymmetricMemory, Workspace
from mkernel.backends.contracts.nic import NicSession
from mkernel.backends.runtime import _runtime
from mkernel.backends.runtime.host_memory import HostPages
from mkernel.errors import (
    ArgumentError,
    BackendUnavailable,
    Diagnosis,
    MkernelError,
    NicError,
    NoRoute,
    PeerFailure,
    PlanMismatch,
    Timeout,
    Unsupported,
    WorldError,
)
from mkernel.launchable import world_obstacles
from mkernel.plan.model import LaunchPlan, first_difference
from mkernel.selection import SOFT, SYSTEM
from mkernel.settings import Settings
from mkernel.topology.model import Topology
from mkernel.topology.placement import place, rails
from mkernel.world import symmetric
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.group_store import GroupStore
from mkernel.world.identity import Backends, Identity
from mkernel.world.sealing import Seal
from mkernel.world.watchdog import Notice, Peer, Watchdog, host_identity

_WAIT_SLICE_S = 0.05
_ATTRIBUTION_S = 1.0
"""How long a failed rank waits to learn the first cause: a dead peer shows up as a NIC error or a
time-out too, and the watchdog's word is the better one."""
_DRAIN_S = 5.0
_NO_CHUNK = 0xFFFFFFFF
_Failure = tuple[_runtime.AbortCode, _runtime.Diagnosis]
_SAME_ON_ALL_RANKS = (
    "start every rank with the same options and settings. What is left to `auto` each rank chooses "
    "from its own machine: name it where machines differ (MKERNEL_ACCELERATOR, MKERNEL_NIC, "
    "MKERNEL_VERBS)"
)
_left_mapped: list[contextlib.ExitStack] = []
"""Memory of broken worlds whose calls did not end in time: kept until the process ends."""


@dataclass
class _PlanState:
    """What one plan holds in one world: symmetric workspace, same-node peers as kernels see them,
    first signal, calls so far."""

    buffer: symmetric.SymmetricBuffer
    peers: Mapping[int, PeerMemory]
    signal_base: int
    epoch: int = 0


class CallRecord(NamedTuple):
    """A call: outputs whose sizes only the call found out; once it has ended, wall seconds by
    kernel, and the trace where one was asked for."""

    times: LaunchTimes
    trace: bytes | None
    results: Mapping[str, Any]


@dataclass
class _State:
    """What changes during a world's life; read by the watchdog's thread.

    ``call`` is (number of the latest call, its ``_key``), replaced as one so that a heartbeat never
    pairs one call's number with another's plan.
    """

    call: tuple[int, str] = (0, "")
    agreements: int = 0
    notice: Notice | None = None
    noticed: threading.Event = field(default_factory=threading.Event)


class World:
    """One rank's view of a world. Made by :func:`init`; not to be constructed by users.

    Thread rule: one thread calls ops and ``close``; others may read attributes.
    """

    def __init__(
        self,
        identity: Identity,
        backends: Backends,
        settings: Settings,
        stores: tuple[Store, Store],
        key: bytes,
    ) -> None:
        """``key``: seals all messages of this world and of no other (``mkernel.world.handshake``)."""
        self.identity = identity
        self.backends = backends
        self.settings = settings
        self._state = _State()
        self._regions = 0
        self._barriers = 0
        self._signals = 0
        self._plans: dict[str, _PlanState] = {}
        self._agreed: set[str] = set()
        self._shared: symmetric.SymmetricBuffer | None = None
        self._nothing: symmetric.SymmetricBuffer | None = None
        self._users: list[symmetric.SymmetricBuffer] = []
        self._running: deque[Launch] = deque()  # in the order of their calls
        self._opened: AcceleratorBackend | None = None
        self.planned: dict[Hashable, LaunchPlan] = {}  # by what was asked for; `ops.common`
        self.checked: dict[Hashable, Any] = {}  # by how the arguments look; `ops.common`
        self._session: NicSession | None = None
        self._group: torch.distributed.ProcessGroup | None = None
        self._memory = contextlib.ExitStack()
        self._undo = contextlib.ExitStack()
        self._key = key
        self._alarm = Bootstrap(stores[1], key)
        self._bootstrap = Bootstrap(stores[0], key, self._tell)
        try:
            self._open()
        except BaseException as error:
            self._tell(error)
            self._release()
            self._raise_what_came_first(error)
            raise

    # ---- building ----------------------------------------------------------------------------

    def _open(self) -> None:
        rank, timeout_s = self.identity.rank, self.settings.timeout_s
        hello = {
            "host": host_identity(),
            "pid": os.getpid(),
            "world": {
                "nodes": self.identity.nodes,
                "ranks_per_node": self.identity.ranks_per_node,
                "accelerator": self.backends.accelerator,
                "nic": self.backends.nic,
                "verbs": self.backends.verbs,
                "signals": self.settings.signals,
            },
        }
        self._bootstrap.publish(f"hello/{rank}", hello)
        hellos = self._bootstrap.collect(
            "hello", range(self.size), timeout_s, lambda missing: self._look_for_abort()
        )
        peers = {other: Peer.from_hello(other, told) for other, told in hellos.items()}
        for other in range(self.size):
            found = first_difference(hello["world"], hellos[other]["world"], "world")
            if found:
                raise PlanMismatch(
                    (rank, other), found[0], (found[1], found[2]), _SAME_ON_ALL_RANKS
                )
        self._check_hosts(peers)
        self._watchdog = Watchdog(
            self._alarm,
            rank,
            peers,
            self.settings.heartbeat_s,
            self._status,
            self._own_failure,
            self._on_notice,
        )
        self._watchdog.start()

        self.accelerator = machine.usable_accelerator(self.backends.accelerator)
        self.topology = self._gather_topology(peers)
        obstacles = world_obstacles(
            self.backends.accelerator, self.accelerator.capabilities(), self.topology
        )
        if obstacles:
            raise Unsupported("; ".join(obstacles))
        here = place(
            self.topology,
            self.identity.ranks_per_node,
            nics=False,
            pinning=self.settings.pinning,
        )[rank].accelerator
        node = self.topology.nodes[self.identity.node]
        self.accelerator.open(next(a for a in node.accelerators if a.id == here))
        self._opened = self.accelerator
        self._open_pad()
        if self.accelerator.capabilities().process_group:
            self._group = self._open_group()
        elif self.backends.nic is not None and self.backends.verbs is not None:
            self._open_nic(self.backends.nic, self.backends.verbs)

    def _check_hosts(self, peers: Mapping[int, Peer]) -> None:
        self._one_host = len({peer.host for peer in peers.values()}) == 1
        for rank, peer in peers.items():
            first = rank - rank % self.identity.ranks_per_node
            if peer.host != peers[first].host:
                raise ArgumentError(
                    "nodes",
                    self.identity.nodes,
                    "a number of nodes such that each node's ranks are on one host",
                    why=f"ranks {first} and {rank} of one node are on different hosts",
                )

    def _gather_topology(self, peers: Mapping[int, Peer]) -> Topology:
        """Each node's first rank describes the node; every rank assembles the same model."""
        me = self.identity
        if me.local_rank == 0:
            here = [
                node
                for node in range(me.nodes)
                if peers[node * me.ranks_per_node].host == peers[me.rank].host
            ]
            whole = machine.machine_topology(self.backends)
            split = machine.emulated_topology(
                whole, self.backends, len(here), me.ranks_per_node, self.settings.ranks_per_device
            )
            own = split.nodes[here.index(me.node)].model_copy(update={"id": me.node})
            self._bootstrap.publish(f"topology/{me.node}", own.model_dump(mode="json"))
        nodes = self._bootstrap.collect(
            "topology", range(me.nodes), self.settings.timeout_s, self._check_peers
        )
        return Topology.model_validate({"nodes": [nodes[node] for node in range(me.nodes)]})

    def _open_pad(self) -> None:
        capacity = self.settings.signals
        buffer = self._allocate(
            _runtime.pad_bytes(capacity),
            lambda memory: _runtime.pad_format(memory.address, capacity),
            HostPages(),
        )
        self._pad = buffer
        if self._state.notice is not None:  # an alarm rang before there was a pad to write it to
            self._on_notice(self._state.notice)

    def _open_nic(self, name: str, verbs: str) -> None:
        me, timeout_s = self.identity, self.settings.timeout_s
        if verbs == SOFT and not self._one_host:
            raise BackendUnavailable(
                f"verbs {SOFT!r} joins processes of one host, and the ranks are on several; bring an "
                "RDMA device up on each (`mkernel doctor` says what is missing) and use verbs "
                f"{SYSTEM!r}, which `auto` takes where it finds one"
            )
        backend = registry.nic(name)
        status = backend.status(verbs)
        if not status.usable:
            raise BackendUnavailable(f"nic {name!r} on {verbs!r}: {status.detail}; {status.remedy}")
        here = place(self.topology, me.ranks_per_node, pinning=self.settings.pinning)[me.rank]
        if not here.nics:
            raise NoRoute(
                f"rank {me.rank} on node {me.node} has no active NIC towards other nodes; "
                "see `mkernel doctor`"
            )
        nics = {nic.id: nic for nic in self.topology.nodes[me.node].nics}
        alike = rails([nics[nic] for nic in here.nics])
        used = alike[: min(self.settings.nic_settings.rails or len(alike), backend.max_rails)]
        devices = ",".join(n.name if n.port == 1 else f"{n.name}:{n.port}" for n in used)
        session = backend.open(devices, verbs, me.rank, self.settings.nic_settings)
        self._undo.callback(session.close)
        if session.fifo == 0:
            raise BackendUnavailable(
                f"nic {name!r} takes puts from the host only (it has no command FIFO), and the "
                f"kernels of accelerator {self.backends.accelerator!r} push theirs into one; use "
                "another NIC"
            )
        far = [r for r, node in enumerate(me.node_of) if node != me.node]
        for peer in far:
            self._bootstrap.publish(f"nic/{peer}/{me.rank}", session.address(peer))
        addresses = self._bootstrap.collect(f"nic/{me.rank}", far, timeout_s, self._check_peers)
        for peer in far:
            session.connect(peer, addresses[peer])
        session.start(self._pad.local.address, here.proxy_cpus)
        self._session = session
        self.barrier()  # nobody puts before every queue pair is ready to receive

    def _open_group(self) -> torch.distributed.ProcessGroup:
        """The user's torch.distributed world where there is one, else one of our own.

        Backends that ask for it leave all traffic to torch.distributed, between nodes too.
        """
        wait = timedelta(seconds=self.settings.timeout_s)
        if self.accelerator.collectives != "gloo":
            # Calls end by the backend's own deadline. A library that runs messages as kernels must
            # not come first: it would take the process down, or let the stream go on without data.
            wait *= 3
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        options = self.accelerator.group_options(wait)
        if torch.distributed.is_initialized():
            size = torch.distributed.get_world_size()
            if size != self.size:
                raise ArgumentError(
                    "WORLD_SIZE", self.size, f"{size}, the size of the torch.distributed world"
                )
            made: torch.distributed.ProcessGroup = torch.distributed.new_group(
                backend=self.accelerator.collectives, timeout=wait, pg_options=options
            )
            return made
        if self._one_host:  # no look-up of the host's name, which needs not resolve
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            self.accelerator.collectives,
            store=self.group_store,
            rank=self.rank,
            world_size=self.size,
            timeout=wait,
            pg_options=options,
        )
        self._undo.callback(torch.distributed.destroy_process_group)
        group = torch.distributed.group.WORLD
        assert group is not None
        return group

    def seal(self, purpose: str) -> Seal:
        """For messages of this world's ranks that take a way of their own."""
        return Seal(hmac.digest(self._key, purpose.encode(), "sha256"))

    @cached_property
    def group_store(self) -> GroupStore:
        """The store through which a process group of this world's ranks may exchange addresses."""
        # Else a thread of NCCL's group polls the store, which is Python code, until the process ends,
        # and may find the interpreter gone.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")

        def check() -> None:
            if self._state.notice is not None:
                raise self._state.notice.error()

        return GroupStore(self._bootstrap, self.settings.timeout_s, check)

    def _allocate(
        self,
        nbytes: int,
        prepare: Callable[[SymmetricMemory], None] = lambda memory: None,
        source: symmetric.Source | None = None,
    ) -> symmetric.SymmetricBuffer:
        """A buffer until the end of the world, from the accelerator or another source. Collective."""
        region, self._regions = self._regions, self._regions + 1
        try:
            buffer = symmetric.allocate(
                region,
                nbytes,
                rank=self.rank,
                node_of=self.identity.node_of,
                source=source or self.accelerator,
                session=self._session,
                bootstrap=self._bootstrap,
                timeout_s=self.settings.timeout_s,
                check=self._check_peers,
                prepare=prepare,
            )
        except (OSError, NicError):
            self._look_for_abort()  # a peer that has failed takes its memory along
            raise
        self._memory.callback(buffer.close)
        return buffer

    # ---- attributes --------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank, 0 to ``size`` - 1."""
        return self.identity.rank

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        return self.identity.size

    @property
    def nic(self) -> NicSession | None:
        """The NIC session to other nodes; None in a world of one node."""
        return self._session

    # ---- calls -------------------------------------------------------------------------------

    def run(
        self,
        plan: LaunchPlan,
        tensors: Mapping[str, torch.Tensor],
        *,
        options: Mapping[str, Any] | None = None,
        view: View = "pipelined",
        trace: bool = False,
        wait: bool = False,
    ) -> CallRecord:
        """Run one call of a plan. Collective: every rank, with the same plan and view.

        Returns when the call has ended; with a stream-ordered backend once it is queued, unless
        ``wait``, a trace or another view than the product's is asked for. The record has times and
        trace only of a call that has ended.

        Raises:
            Unsupported: the accelerator is not instrumented, and has the product's view only.
            PlanMismatch: another rank calls something else; nothing was launched.
            WorldError: PeerFailure, Timeout, NicError, Untrusted or Cancelled, the same kind on every
                rank; of this call, or of an earlier one that was only queued.
        """
        if view != "pipelined" and not isinstance(self.accelerator, Instrumented):
            raise Unsupported(
                f"accelerator {self.accelerator.name!r} runs calls in the view 'pipelined' only, not "
                f"{view!r}: it is not mkernel.backends.contracts.instrumented.Instrumented"
            )
        self._raise_if_broken()
        self._raise_own_failure()
        running = self._running
        while running and running[0].wait(0.0):
            running.popleft()
        with self.accelerator.on(tensors):
            launch = self._launch(plan, tensors, options or {}, view, trace, wait)
        self._running.append(launch)
        if not (wait or trace or view != "pipelined") and self._queues:
            return CallRecord(LaunchTimes(), None, launch.results())
        self._await()
        if not self._may_reuse():
            raise self._flush_failure()
        times, trace_ = instrumented.times(launch), instrumented.trace(launch)
        return CallRecord(times, trace_, launch.results())

    @cached_property
    def _queues(self) -> bool:
        """Whether calls may be left to the device. A put may have to be repeated after its reader is
        done where a NIC does not keep order: there the host waits for every call."""
        ordered = self._session is None or self._session.capabilities().ordered
        return self.accelerator.capabilities().stream_ordered and ordered

    def _launch(
        self,
        plan: LaunchPlan,
        tensors: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        view: View,
        trace: bool,
        wait: bool,
    ) -> Launch:
        placed = self._in_symmetric_memory(tensors)
        number, key = self._state.call[0] + 1, _key(plan, placed)
        # A rank that has not agreed yet shows no plan: what it calls, its word in the agreement says.
        self._state.call = (number, key if key in self._agreed else "")
        if key not in self._agreed:
            self._agree(plan, key, placed)
            self._state.call = (number, key)
        state = self._plans.get(plan.digest()) or self._adopt(plan)
        state.epoch += 1
        return self.accelerator.launch(
            Call(
                plan=plan,
                rank=self.rank,
                tensors=tensors,
                epoch=state.epoch,
                number=number,
                pad=self._pad.local.address,
                workspace=state.buffer.local.address,
                signal_base=state.signal_base,
                peers=state.peers,
                region=state.buffer.region,
                fifo=self._session.fifo if self._session else 0,
                timeout_s=self.settings.timeout_s,
                view=view,
                trace=trace,
                timed=wait or view != "pipelined",
                options=options,
                group=self._group,
                symmetric={
                    name: self._everywhere(self._users[number], offset)
                    for name, (number, offset) in placed.items()
                },
            )
        )

    def synchronize(self) -> None:
        """Return once every call that this rank has made is over.

        Raises:
            WorldError: what broke one of them, the same kind on every rank. Timeout also where the
                device did not come to a call within twice the deadline.
        """
        self._await()
        self._raise_if_broken()

    def _await(self) -> None:
        """Wait for the calls under way, and raise what broke them."""
        try:
            while self._running:
                self._await_first()
        except WorldError:
            raise
        except BaseException as error:  # Ctrl-C: stop the kernels before their memory can go
            self._tell(error)
            deadline = time.monotonic() + _DRAIN_S
            with contextlib.suppress(Exception):  # the first error is the one to hear of
                while self._running and self._running[0].wait(deadline - time.monotonic()):
                    self._running.popleft()
            self._running.clear()
            raise
        self._raise_own_failure()

    def _await_first(self) -> None:
        # Its own waits end by the deadline; before it starts, the user's own work may be queued.
        limit_s = 2 * self.settings.timeout_s + _DRAIN_S
        deadline = time.monotonic() + limit_s
        while not self._running[0].wait(_WAIT_SLICE_S):
            if time.monotonic() > deadline:
                self._raise_own_failure()
                error = Timeout(
                    f"a call of rank {self.rank} did not end within {limit_s:g} s; is its device "
                    "still busy with other work? (MKERNEL_TIMEOUT_S raises the limit)"
                )
                self._tell(error)
                raise error
        self._running.popleft()

    def _may_reuse(self) -> bool:
        """Whether the memory that the call's puts read from may be written again.

        On an ordered NIC a peer's release says so: it came after the data. Without order a put may
        still be repeated after the peer has seen it, so local completion is awaited.
        """
        if self._session is None or self._session.capabilities().ordered:
            return True
        return self._session.flush(self.settings.timeout_s)

    def _flush(self) -> None:
        """Raise what the puts still under way come to."""
        if self._session is not None and not self._session.flush(self.settings.timeout_s):
            raise self._flush_failure()

    def barrier(self) -> None:
        """Return once every rank has called it. Timeout, PeerFailure."""
        number, self._barriers = self._barriers, self._barriers + 1
        self._bootstrap.publish(f"barrier/{number}/{self.rank}", True)
        self._bootstrap.collect(
            f"barrier/{number}", range(self.size), self.settings.timeout_s, self._check_peers
        )

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """:func:`mkernel.empty` in this world. Collective."""
        sizes = tuple(int(size) for size in shape)
        if not sizes or min(sizes) < 1:
            raise ArgumentError("shape", sizes, "at least one dimension, each of at least 1")
        self._raise_if_broken()
        buffer = self._allocate(math.prod(sizes) * dtype.itemsize)
        made = buffer.local.tensor(0, sizes, dtype)
        self._users.append(buffer)
        return made

    def _in_symmetric_memory(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, tuple[int, int]]:
        """By name, the tensors that lie in a buffer of ``empty``: (its number, offset there)."""
        found = {}
        for name, tensor in tensors.items() if self._users else ():
            start, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            for number, buffer in enumerate(self._users):
                offset = start - buffer.local.address
                if offset >= 0 and offset + nbytes <= buffer.nbytes:
                    found[name] = (number, offset)
        return found

    def _everywhere(self, buffer: symmetric.SymmetricBuffer, offset: int) -> tuple[int, ...]:
        """Where each rank's piece of a buffer lies at ``offset``, in this process; 0: cannot."""
        memories = {self.rank: buffer.local, **buffer.peers}
        return tuple(
            memories[rank].address + offset if rank in memories else 0 for rank in range(self.size)
        )

    def _adopt(self, plan: LaunchPlan) -> _PlanState:
        """First call of a plan, which every rank agreed on: allocate its workspace."""
        needs = self.accelerator.workspace(plan)
        if self._signals + needs.signals > self.settings.signals:
            raise ArgumentError(
                "MKERNEL_SIGNALS",
                self.settings.signals,
                f"at least {self._signals + needs.signals} for the plans of this world",
            )
        base, self._signals = self._signals, self._signals + needs.signals
        buffer = self._workspace(needs)
        peers = {
            r: PeerMemory(self._pad.peers[r].address, memory.address)
            for r, memory in buffer.peers.items()
        }
        state = self._plans[plan.digest()] = _PlanState(buffer, peers, base)
        return state

    def _workspace(self, needs: Workspace) -> symmetric.SymmetricBuffer:
        """Memory for a plan: its own, or what the world's plans share. The latter doubles where it is
        too small, so that all that earlier plans keep is no more than the newest."""
        if not needs.shared and needs.nbytes == 0:  # it is still how peers' pads are known
            self._nothing = self._nothing or self._allocate(1, source=HostPages())
            return self._nothing
        if not needs.shared:
            return self._allocate(needs.nbytes, self.accelerator.format)
        nbytes = max(1, needs.nbytes)  # a world of one needs none
        if self._shared is None or self._shared.nbytes < nbytes:
            before = 0 if self._shared is None else self._shared.nbytes
            self._shared = self._allocate(max(nbytes, 2 * before), self.accelerator.format)
        return self._shared

    def _agree(self, plan: LaunchPlan, key: str, placed: Mapping[str, tuple[int, int]]) -> None:
        """See that every rank makes the same call. ``placed``: its tensors in symmetric memory, which
        peers write to, so that they must lie at the same place everywhere."""
        number, self._state.agreements = self._state.agreements, self._state.agreements + 1
        told = plan.model_dump(mode="json")
        told["symmetric"] = {
            name: {"buffer": buffer, "offset": offset} for name, (buffer, offset) in placed.items()
        }
        self._bootstrap.publish(f"plans/{key}", told)
        self._bootstrap.publish(f"plan/{number}/{self.rank}", key)

        def check(missing: set[int]) -> None:
            self._check_peers(missing)
            for rank in sorted(missing):  # not here: is it in the same call with another plan?
                told = self._bootstrap.peek(f"heartbeat/{rank}")
                if told and told["call"] == self._state.call[0] and told["plan"] not in ("", key):
                    self._refuse(rank, key, told["plan"])

        keys = self._bootstrap.collect(
            f"plan/{number}", range(self.size), self.settings.timeout_s, check
        )
        for rank in range(self.size):
            if keys[rank] != keys[0]:
                self._refuse(rank, keys[0], keys[rank], first_rank=0)
        self._agreed.add(key)

    def _refuse(self, rank: int, ours: str, theirs: str, first_rank: int | None = None) -> None:
        mine, other = (self._bootstrap.peek(f"plans/{key}") for key in (ours, theirs))
        found = first_difference(mine, other) or ("digest", ours, theirs)
        one = self.rank if first_rank is None else first_rank
        error = PlanMismatch((one, rank), found[0], (found[1], found[2]))
        if first_rank is None:  # the other rank is already past its agreement: end its waits
            self._tell(error)
        raise error

    # ---- failure -----------------------------------------------------------------------------

    def _status(self) -> dict[str, Any]:
        number, key = self._state.call
        return {"call": number, "plan": key}

    def _on_notice(self, notice: Notice) -> None:
        """Take the world's first failure and end every wait of this rank. Any thread."""
        self._state.notice = self._state.notice or notice
        code = {
            "Timeout": _runtime.AbortCode.timeout,
            "NicError": _runtime.AbortCode.nic_error,
            "Cancelled": _runtime.AbortCode.cancelled,
        }.get(notice.kind, _runtime.AbortCode.peer_failure)
        pad = getattr(self, "_pad", None)
        if pad is not None:
            _runtime.pad_abort(pad.local.address, code)
        if self._opened is not None:
            self._opened.abort(code)
        self._state.noticed.set()

    def _tell(self, error: BaseException) -> None:
        """Let every other rank know that this one failed."""
        notice = Notice.from_error(self.rank, error)
        watchdog = getattr(self, "_watchdog", None)
        if watchdog is not None:
            notice = watchdog.raise_alarm(notice)
        else:
            with contextlib.suppress(MkernelError):
                self._alarm.publish_first("abort", notice.to_json())
        self._on_notice(notice)

    def _raise_what_came_first(self, error: BaseException) -> None:
        """Raise the world's first failure where ``error`` is what it led to here: a peer's memory or
        connection that is gone, say."""
        echo = isinstance(error, WorldError) or not isinstance(error, MkernelError)
        first = self._state.notice
        if not isinstance(error, Exception) or not echo or first is None:
            return
        if first != Notice.from_error(self.rank, error):
            raise first.error() from error

    def _recorded(self) -> _Failure | None:
        """What this rank's kernels and proxy recorded as wrong; None: nothing. Any thread."""
        pad = getattr(self, "_pad", None)
        if pad is not None and _runtime.pad_aborted(pad.local.address):
            return _runtime.pad_outcome(pad.local.address)
        return None if self._opened is None else self._opened.failure()

    def _raise_own_failure(self) -> None:
        found = self._recorded()
        if found is not None:
            raise self._failure(*found)

    def _flush_failure(self) -> WorldError:
        """Why puts did not complete: what was recorded, or nothing but the time that has passed."""
        return self._failure(*(self._recorded() or (_runtime.AbortCode.none, _runtime.Diagnosis())))

    def _failure(self, code: _runtime.AbortCode, who: _runtime.Diagnosis) -> WorldError:
        """The one error that every rank of a broken world raises."""
        if not self._state.noticed.wait(_ATTRIBUTION_S):
            self._tell(self._local_failure(code, who))
        notice = self._state.notice
        assert notice is not None
        self._running.clear()  # what broke them has been raised
        return notice.error()

    def _local_failure(self, code: _runtime.AbortCode, who: _runtime.Diagnosis) -> WorldError:
        nic = self._session.failure() if self._session else None
        if nic is not None:
            return nic
        if code == _runtime.AbortCode.peer_failure:
            text = f"rank {self.rank} lost its connection to rank {who.peer} in call {who.op}"
            return PeerFailure(text, who.peer)
        if code == _runtime.AbortCode.timeout:
            diagnosis = Diagnosis(
                rank=self.rank,
                waiter=who.waiter.name,
                core=who.core,
                signal=who.signal,
                seen=who.seen,
                wanted=who.wanted,
                op=who.op,
                chunk=None if who.chunk == _NO_CHUNK else who.chunk,
                peer=who.peer,
            )
            limit = f"within {self.settings.timeout_s:g} s"
            waiting = self._opened.at_deadline() if self._opened else ""
            return Timeout(
                f"{diagnosis}; nothing came {limit}: is that rank in the same call? "
                f"{self._who_is_behind()}(MKERNEL_TIMEOUT_S raises the limit)"
                + (f"; all that waited on rank {self.rank} then: {waiting}" if waiting else ""),
                diagnosis,
            )
        return Timeout(f"the NIC did not complete its puts within {self.settings.timeout_s:g} s")

    def _who_is_behind(self) -> str:
        """The first rank that has not reached this call, in words. The rank that is waited for may
        itself wait for another."""
        call = self._state.call[0]
        for rank in range(self.size):
            with contextlib.suppress(MkernelError):
                told = self._alarm.peek(f"heartbeat/{rank}") if rank != self.rank else None
                if told is not None and told["call"] < call:
                    return f"Rank {rank} is still in call {told['call']}. "
        return ""

    def _own_failure(self) -> Notice | None:
        """What this rank recorded as wrong before anybody told. The watchdog's thread."""
        if self._state.notice is not None:
            return None
        found = self._recorded()
        return None if found is None else Notice.from_error(self.rank, self._local_failure(*found))

    def _look_for_abort(self) -> None:
        told = self._bootstrap.peek("abort")
        if told is not None:
            self._on_notice(Notice.from_json(told))
            self._raise_if_broken()

    def _raise_if_broken(self) -> None:
        if self._state.notice is not None:
            self._running.clear()  # what broke them is raised here
            raise self._state.notice.error()

    def _check_peers(self, missing: set[int]) -> None:
        self._raise_if_broken()
        gone = sorted(missing & self._watchdog.left())
        if gone:
            self._look_for_abort()  # a rank that fails says so before it leaves
            raise PeerFailure(f"rank {gone[0]} has left the world; it cannot take part", gone[0])

    def close(self, error: BaseException | None = None) -> None:
        """Take the world down. Collective where it is healthy; alone where it is broken.

        Args:
            error: why this rank stops early, told to the others; None: a normal end.

        Raises:
            WorldError: what broke a call that was only queued, where nothing raised it before.
        """
        try:
            if error is not None and self._state.notice is None:
                self._tell(error)
            if error is None and self._running:
                self.synchronize()
            if self._state.notice is None:
                self._flush()
                self.barrier()  # no rank unmaps while another still writes
        finally:
            self._release()

    def _release(self) -> None:
        # The watchdog first: it writes the abort word into the pad, which must still be mapped.
        if hasattr(self, "_watchdog"):
            self._watchdog.stop()
        quiet = self._opened is None or self._opened.close(_DRAIN_S)
        self._undo.close()  # the session before the memory that is registered with it
        if quiet:
            self._memory.close()
        else:
            _left_mapped.append(self._memory)


def _key(plan: LaunchPlan, placed: Mapping[str, tuple[int, int]]) -> str:
    """What all ranks must share of a call: the plan, and where its symmetric tensors lie."""
    if not placed:
        return plan.digest()
    places = "".join(f" {name}@{number}+{offset}" for name, (number, offset) in placed.items())
    return plan.digest() + places
