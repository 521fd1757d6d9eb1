"""A world: the ranks that call ops together, and what they share.

Building one goes bootstrap → topology → symmetric signal pad → NIC session. The world owns
symmetric memory, signal numbers, epochs and failure handling; backends only run kernels and move
bytes.
Several worlds may follow one another in one process (``mkernel.current``).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

from mkernel import machine, symmetric
from mkernel.backends import registry
from mkernel.backends.base import (
    Call,
    LaunchTimes,
    NicSession,
    PeerMemory,
    View,
)
from mkernel.backends.runtime import _runtime
from mkernel.bootstrap import Bootstrap
from mkernel.errors import (
    ArgumentError,
    BackendUnavailable,
    Diagnosis,
    MkernelError,
    NoRoute,
    PeerFailure,
    PlanMismatch,
    Timeout,
    Unsupported,
    WorldError,
)
from mkernel.identity import Backends, Identity
from mkernel.plan.model import LaunchPlan, first_difference
from mkernel.settings import Settings
from mkernel.topology.model import Topology
from mkernel.topology.placement import place
from mkernel.watch import Notice, Peer, Watchdog, host_identity

_WAIT_SLICE_S = 0.05
_ATTRIBUTION_S = 1.0
"""How long a failed rank waits to learn the first cause: a dead peer shows up as a NIC error or a
time-out too, and the watchdog's word is the better one."""
_DRAIN_S = 5.0
_NO_CHUNK = 0xFFFFFFFF


@dataclass
class _PlanState:
    """What one plan holds in one world: symmetric workspace, first signal, calls so far."""

    buffer: symmetric.SymmetricBuffer
    signal_base: int
    epoch: int = 0


@dataclass(frozen=True)
class CallRecord:
    """A finished call: wall seconds by kernel, the trace where one was asked for, and outputs whose
    sizes only the call found out."""

    times: LaunchTimes
    trace: bytes | None
    results: Mapping[str, Any]


@dataclass
class _State:
    """What changes during a world's life; read by the watchdog's thread.

    ``call`` is (number of the latest call, digest of its plan), replaced as one so that a
    heartbeat never pairs one call's number with another's plan.
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
    ) -> None:
        self.identity = identity
        self.backends = backends
        self.settings = settings
        self._state = _State()
        self._regions = 0
        self._barriers = 0
        self._signals = 0
        self._plans: dict[str, _PlanState] = {}
        self.planned: dict[Hashable, LaunchPlan] = {}  # by what was asked for; `ops.common`
        self._session: NicSession | None = None
        self._group: torch.distributed.ProcessGroup | None = None
        self._store = stores[0]
        self._undo = contextlib.ExitStack()
        secret = settings.job_secret.get_secret_value().encode()
        self._bootstrap = Bootstrap(stores[0], secret)
        self._alarm = Bootstrap(stores[1], secret)
        try:
            self._open()
        except BaseException as error:
            self._tell(error)
            self._release()
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
        for other in range(self.size):
            found = first_difference(hello["world"], hellos[other]["world"], "world")
            if found:
                raise PlanMismatch((rank, other), found[0], (found[1], found[2]))
        peers = {r: Peer(r, h["host"], h["pid"]) for r, h in hellos.items()}
        self._check_hosts(peers)
        self._one_host = len({peer.host for peer in peers.values()}) == 1
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
        self._open_pad()
        if self.accelerator.capabilities().process_group:
            self._group = self._open_group()
        elif self.backends.nic is not None and self.backends.verbs is not None:
            self._open_nic(self.backends.nic, self.backends.verbs)

    def _check_hosts(self, peers: Mapping[int, Peer]) -> None:
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
            split = machine.emulated_topology(whole, self.backends, len(here), me.ranks_per_node)
            own = split.nodes[here.index(me.node)].model_copy(update={"id": me.node})
            self._bootstrap.publish(f"topology/{me.node}", own.model_dump(mode="json"))
        nodes = self._bootstrap.collect(
            "topology", range(me.nodes), self.settings.timeout_s, self._check_peers
        )
        return Topology.model_validate({"nodes": [nodes[node] for node in range(me.nodes)]})

    def _open_pad(self) -> None:
        capacity = self.settings.signals
        buffer = self._allocate(
            _runtime.pad_bytes(capacity), lambda at: _runtime.pad_format(at, capacity)
        )
        self._pad = buffer
        if self._state.notice is not None:  # an alarm rang before there was a pad to write it to
            self._on_notice(self._state.notice)

    def _open_nic(self, name: str, verbs: str) -> None:
        me, timeout_s = self.identity, self.settings.timeout_s
        backend = registry.nic(name)
        status = backend.status(verbs)
        if not status.usable:
            raise BackendUnavailable(f"nic {name!r} on {verbs!r}: {status.detail}; {status.remedy}")
        paths = self.accelerator.capabilities().transfer_paths
        if "nic" not in paths:
            raise Unsupported(
                f"accelerator {self.backends.accelerator!r} has no path between nodes (it claims "
                f"{', '.join(paths)}); make a world of one node, or use another accelerator"
            )
        here = place(self.topology, me.ranks_per_node)[me.rank]
        if not here.nics:
            raise NoRoute(
                f"rank {me.rank} on node {me.node} has no active NIC towards other nodes; "
                "see `mkernel doctor`"
            )
        nics = {nic.id: nic for nic in self.topology.nodes[me.node].nics}
        device = nics[here.nics[0]].name
        session = backend.open(device, verbs, me.rank, self.settings.nic_settings)
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
        if torch.distributed.is_initialized():
            size = torch.distributed.get_world_size()
            if size != self.size:
                raise ArgumentError(
                    "WORLD_SIZE", self.size, f"{size}, the size of the torch.distributed world"
                )
            made: torch.distributed.ProcessGroup = torch.distributed.new_group(
                backend=self.accelerator.collectives, timeout=wait
            )
            return made
        if self._one_host:  # no look-up of the host's name, which needs not resolve
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            self.accelerator.collectives,
            store=PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=wait,
        )
        self._undo.callback(torch.distributed.destroy_process_group)
        group = torch.distributed.group.WORLD
        assert group is not None
        return group

    def _allocate(
        self, nbytes: int, prepare: Callable[[int], None] = lambda at: None
    ) -> symmetric.SymmetricBuffer:
        region, self._regions = self._regions, self._regions + 1
        buffer = symmetric.allocate(
            region,
            nbytes,
            rank=self.rank,
            node_of=self.identity.node_of,
            backend=self.accelerator,
            session=self._session,
            bootstrap=self._bootstrap,
            timeout_s=self.settings.timeout_s,
            check=self._check_peers,
            prepare=prepare,
        )
        self._undo.callback(buffer.close)
        # Registered memory outlives the session: close it again here, first, when undoing.
        if self._session is not None:
            self._undo.callback(self._session.close)
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
    ) -> CallRecord:
        """Run one call of a plan to its end. Collective: every rank, with the same plan and view.

        Raises:
            PlanMismatch: another rank calls something else; nothing was launched.
            WorldError: PeerFailure, Timeout, NicError or Cancelled, the same kind on every rank.
        """
        self._raise_if_broken()
        number, digest = self._state.call[0] + 1, plan.digest()
        self._state.call = (number, digest)
        state = self._plans.get(digest) or self._adopt(plan, digest)
        state.epoch += 1
        launch = self.accelerator.launch(
            Call(
                plan=plan,
                rank=self.rank,
                tensors=tensors,
                epoch=state.epoch,
                number=number,
                pad=self._pad.local.address,
                workspace=state.buffer.local.address,
                signal_base=state.signal_base,
                peers={
                    r: PeerMemory(self._pad.peers[r].address, memory.address)
                    for r, memory in state.buffer.peers.items()
                },
                region=state.buffer.region,
                fifo=self._session.fifo if self._session else 0,
                timeout_s=self.settings.timeout_s,
                view=view,
                trace=trace,
                options=options or {},
                group=self._group,
            )
        )
        try:
            while not launch.wait(_WAIT_SLICE_S):
                pass
        except BaseException as error:  # Ctrl-C: stop the kernels before their memory can go
            self._tell(error)
            launch.wait(_DRAIN_S)
            raise
        code, who = _runtime.pad_outcome(self._pad.local.address)
        if code != _runtime.AbortCode.none or not self._may_reuse():
            raise self._failure(code, who)
        return CallRecord(launch.times(), launch.trace(), launch.results())

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
            raise self._failure(*_runtime.pad_outcome(self._pad.local.address))

    def barrier(self) -> None:
        """Return once every rank has called it. Timeout, PeerFailure."""
        number, self._barriers = self._barriers, self._barriers + 1
        self._bootstrap.publish(f"barrier/{number}/{self.rank}", True)
        self._bootstrap.collect(
            f"barrier/{number}", range(self.size), self.settings.timeout_s, self._check_peers
        )

    def _adopt(self, plan: LaunchPlan, digest: str) -> _PlanState:
        """First call of a plan: agree on it with every rank, then allocate its workspace."""
        self._agree(plan, digest)
        needs = self.accelerator.workspace(plan)
        if self._signals + needs.signals > self.settings.signals:
            raise ArgumentError(
                "MKERNEL_SIGNALS",
                self.settings.signals,
                f"at least {self._signals + needs.signals} for the plans of this world",
            )
        base, self._signals = self._signals, self._signals + needs.signals
        state = _PlanState(self._allocate(max(1, needs.nbytes)), base)  # a world of one needs none
        self._plans[digest] = state
        return state

    def _agree(self, plan: LaunchPlan, digest: str) -> None:
        number, self._state.agreements = self._state.agreements, self._state.agreements + 1
        self._bootstrap.publish(f"plans/{digest}", plan.model_dump(mode="json"))
        self._bootstrap.publish(f"plan/{number}/{self.rank}", digest)

        def check(missing: set[int]) -> None:
            self._check_peers(missing)
            for rank in sorted(missing):  # not here: is it in the same call with another plan?
                told = self._bootstrap.peek(f"heartbeat/{rank}")
                if told and told["call"] == self._state.call[0] and told["plan"] != digest:
                    self._refuse(rank, digest, told["plan"])

        told = self._bootstrap.collect(
            f"plan/{number}", range(self.size), self.settings.timeout_s, check
        )
        for rank in range(self.size):
            if told[rank] != told[0]:
                self._refuse(rank, told[0], told[rank], first_rank=0)

    def _refuse(self, rank: int, ours: str, theirs: str, first_rank: int | None = None) -> None:
        mine, other = (self._bootstrap.peek(f"plans/{digest}") for digest in (ours, theirs))
        found = first_difference(mine, other) or ("digest", ours, theirs)
        one = self.rank if first_rank is None else first_rank
        error = PlanMismatch((one, rank), found[0], (found[1], found[2]))
        if first_rank is None:  # the other rank is already past its agreement: end its waits
            self._tell(error)
        raise error

    # ---- failure -----------------------------------------------------------------------------

    def _status(self) -> dict[str, Any]:
        number, digest = self._state.call
        return {"call": number, "plan": digest}

    def _on_notice(self, notice: Notice) -> None:
        """Take the world's first failure and end every wait of this rank. Any thread."""
        self._state.notice = self._state.notice or notice
        pad = getattr(self, "_pad", None)
        if pad is not None:
            code = {
                "Timeout": _runtime.AbortCode.timeout,
                "NicError": _runtime.AbortCode.nic_error,
                "Cancelled": _runtime.AbortCode.cancelled,
            }.get(notice.kind, _runtime.AbortCode.peer_failure)
            _runtime.pad_abort(pad.local.address, code)
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

    def _failure(self, code: _runtime.AbortCode, who: _runtime.Diagnosis) -> WorldError:
        """The one error that every rank of a broken world raises."""
        if not self._state.noticed.wait(_ATTRIBUTION_S):
            self._tell(self._local_failure(code, who))
        notice = self._state.notice
        assert notice is not None
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
            return Timeout(
                f"{diagnosis}; nothing came {limit}: is that rank in the same call? "
                f"{self._who_is_behind()}(MKERNEL_TIMEOUT_S raises the limit)",
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
        """What this rank's pad says went wrong, before anybody told. The watchdog's thread."""
        pad = getattr(self, "_pad", None)
        if pad is None or self._state.notice is not None:
            return None
        code, who = _runtime.pad_outcome(pad.local.address)
        if code == _runtime.AbortCode.none:
            return None
        return Notice.from_error(self.rank, self._local_failure(code, who))

    def _look_for_abort(self) -> None:
        told = self._bootstrap.peek("abort")
        if told is not None:
            self._on_notice(Notice.from_json(told))
            self._raise_if_broken()

    def _raise_if_broken(self) -> None:
        if self._state.notice is not None:
            raise self._state.notice.error()

    def _check_peers(self, missing: set[int]) -> None:
        self._raise_if_broken()
        gone = sorted(missing & self._watchdog.left())
        if gone:
            raise PeerFailure(f"rank {gone[0]} has left the world; it cannot take part", gone[0])

    def close(self, error: BaseException | None = None) -> None:
        """Take the world down. Collective where it is healthy; alone where it is broken.

        Args:
            error: why this rank stops early, told to the others; None: a normal end.
        """
        try:
            if error is not None and self._state.notice is None:
                self._tell(error)
            if self._state.notice is None:
                self._flush()
                self.barrier()  # no rank unmaps while another still writes
        finally:
            self._release()

    def _release(self) -> None:
        # The watchdog first: it writes the abort word into the pad, which must still be mapped.
        if hasattr(self, "_watchdog"):
            self._watchdog.stop()
        self._undo.close()
