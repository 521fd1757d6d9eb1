"""A world: the ranks that call ops together, and what they share.

``init`` builds it (bootstrap → topology → symmetric signal pad → NIC sessions), ``finalize`` takes
it down; several worlds may follow one another in one process. The world owns symmetric memory,
signal numbers, epochs and failure handling; backends only run kernels and move bytes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

from mkernel import symmetric
from mkernel.backends import registry
from mkernel.backends.base import (
    AcceleratorBackend,
    Call,
    LaunchTimes,
    NicSession,
    PeerMemory,
    View,
)
from mkernel.backends.runtime import _runtime
from mkernel.bootstrap import Bootstrap
from mkernel.errors import (
    AlreadyInitialized,
    ArgumentError,
    BackendUnavailable,
    Diagnosis,
    MkernelError,
    NotInitialized,
    PeerFailure,
    PlanMismatch,
    Timeout,
    WorldError,
)
from mkernel.plan.model import LaunchPlan, first_difference
from mkernel.settings import Settings
from mkernel.topology.discover import discover
from mkernel.topology.emulate import emulate
from mkernel.topology.model import Topology
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
    """Outcome of one finished call: wall seconds by kernel, and the trace where one was asked for."""

    times: LaunchTimes
    trace: bytes | None


@dataclass(frozen=True)
class Identity:
    """Where a rank stands. ``rank`` = ``node * ranks_per_node + local_rank``."""

    rank: int
    nodes: int
    ranks_per_node: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def node(self) -> int:
        """Index of this rank's node."""
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """Index of this rank in its node."""
        return self.rank % self.ranks_per_node

    @property
    def node_of(self) -> tuple[int, ...]:
        """Node of every rank."""
        return tuple(rank // self.ranks_per_node for rank in range(self.size))


@dataclass(frozen=True)
class Backends:
    """Names of what a world runs on. ``nic`` and ``verbs`` are None in a world of one node."""

    accelerator: str
    nic: str | None
    verbs: str | None


@dataclass
class _State:
    """What changes during a world's life; read by the watchdog's thread."""

    calls: int = 0
    agreements: int = 0
    plan: str = ""
    notice: Notice | None = None
    noticed: threading.Event = field(default_factory=threading.Event)


class World:
    """One rank's view of a world. Made by :func:`init`; not to be constructed by users.

    Thread rule: one thread calls ops and ``close``; others may read attributes.
    """

    def __init__(
        self, identity: Identity, backends: Backends, settings: Settings, stores: tuple[Store, Store]
    ) -> None:
        self.identity = identity
        self.backends = backends
        self.settings = settings
        self._state = _State()
        self._regions = 0
        self._barriers = 0
        self._signals = 0
        self._plans: dict[str, _PlanState] = {}
        self._session: NicSession | None = None
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
        self._watchdog = Watchdog(
            self._alarm, rank, peers, self.settings.heartbeat_s, self._status, self._on_notice
        )
        self._watchdog.start()

        self.accelerator = _usable_accelerator(self.backends.accelerator)
        self.topology = self._gather_topology(peers)
        self._open_pad()
        if self.backends.nic is not None and self.backends.verbs is not None:
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
            machine = machine_topology(self.backends)
            split = emulated_topology(machine, self.backends, len(here), me.ranks_per_node)
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
        device = self.topology.nodes[me.node].nics[0].name
        session = backend.open(device, verbs, me.rank, self.settings.nic_settings)
        self._undo.callback(session.close)
        far = [r for r, node in enumerate(me.node_of) if node != me.node]
        for peer in far:
            self._bootstrap.publish(f"nic/{peer}/{me.rank}", session.address(peer))
        addresses = self._bootstrap.collect(f"nic/{me.rank}", far, timeout_s, self._check_peers)
        for peer in far:
            session.connect(peer, addresses[peer])
        session.start(self._pad.local.address, ())
        self._session = session
        self.barrier()  # nobody puts before every queue pair is ready to receive

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
        view: View = "pipelined",
        trace: bool = False,
    ) -> CallRecord:
        """Run one call of a plan to its end. Collective: every rank, with the same plan and view.

        Raises:
            PlanMismatch: another rank calls something else; nothing was launched.
            WorldError: PeerFailure, Timeout, NicError or Cancelled, the same kind on every rank.
        """
        self._raise_if_broken()
        self._state.calls += 1
        self._state.plan = plan.digest()
        state = self._plans.get(self._state.plan) or self._adopt(plan)
        if view != "compute_only":  # raises no signals, so it must not advance what waits expect
            state.epoch += 1
        launch = self.accelerator.launch(
            Call(
                plan=plan,
                rank=self.rank,
                tensors=tensors,
                epoch=max(1, state.epoch),
                number=self._state.calls,
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
        flushed = self._session is None or (
            code is _runtime.AbortCode.none and self._session.flush(self.settings.timeout_s)
        )
        if code is not _runtime.AbortCode.none or not flushed:
            raise self._failure(code, who)
        return CallRecord(launch.times(), launch.trace())

    def barrier(self) -> None:
        """Return once every rank has called it. Timeout, PeerFailure."""
        number, self._barriers = self._barriers, self._barriers + 1
        self._bootstrap.publish(f"barrier/{number}/{self.rank}", True)
        self._bootstrap.collect(
            f"barrier/{number}", range(self.size), self.settings.timeout_s, self._check_peers
        )

    def _adopt(self, plan: LaunchPlan) -> _PlanState:
        """First call of a plan: agree on it with every rank, then allocate its workspace."""
        self._agree(plan)
        needs = self.accelerator.workspace(plan)
        if self._signals + needs.signals > self.settings.signals:
            raise ArgumentError(
                "MKERNEL_SIGNALS",
                self.settings.signals,
                f"at least {self._signals + needs.signals} for the plans of this world",
            )
        base, self._signals = self._signals, self._signals + needs.signals
        state = _PlanState(self._allocate(needs.nbytes), base)
        self._plans[plan.digest()] = state
        return state

    def _agree(self, plan: LaunchPlan) -> None:
        number, self._state.agreements = self._state.agreements, self._state.agreements + 1
        digest = plan.digest()
        self._bootstrap.publish(f"plans/{digest}", plan.model_dump(mode="json"))
        self._bootstrap.publish(f"plan/{number}/{self.rank}", digest)

        def check(missing: set[int]) -> None:
            self._check_peers(missing)
            for rank in sorted(missing):  # not here: is it in the same call with another plan?
                told = self._bootstrap.peek(f"heartbeat/{rank}")
                if told and told["call"] == self._state.calls and told["plan"] != digest:
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
        return {"call": self._state.calls, "plan": self._state.plan}

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
        if code is _runtime.AbortCode.timeout:
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
                "(MKERNEL_TIMEOUT_S raises the limit)",
                diagnosis,
            )
        return Timeout(f"the NIC did not complete its puts within {self.settings.timeout_s:g} s")

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
                self.barrier()  # no rank unmaps while another still writes
        finally:
            self._release()

    def _release(self) -> None:
        # The watchdog first: it writes the abort word into the pad, which must still be mapped.
        if hasattr(self, "_watchdog"):
            self._watchdog.stop()
        self._undo.close()


def machine_topology(backends: Backends) -> Topology:
    """This machine as sysfs, NVML and the chosen backends see it (one node)."""
    accelerator = registry.accelerator(backends.accelerator)
    nics = () if not backends.nic else registry.nic(backends.nic).probe(backends.verbs or "system")
    return discover(accelerators=accelerator.probe(), nics=nics).topology


def emulated_topology(
    machine: Topology, backends: Backends, nodes: int, ranks_per_node: int
) -> Topology:
    """``machine`` split into emulated nodes for a world on it."""
    accelerator = registry.accelerator(backends.accelerator).probe()[0]
    nic = None
    if backends.nic:
        found = registry.nic(backends.nic).probe(backends.verbs or "system")
        nic = found[0] if found else None
    return emulate(machine, nodes, ranks_per_node, accelerator, nic)


def _usable_accelerator(name: str) -> AcceleratorBackend:
    backend = registry.accelerator(name)
    status = backend.status()
    if not status.usable:
        raise BackendUnavailable(f"accelerator {name!r}: {status.detail}; {status.remedy}")
    return backend


class _Current:
    """The process's world, and how many it has had (each gets its own key prefix)."""

    world: World | None = None
    generation: int = 0


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
        accelerator, nic, verbs: names of backends and provider. Defaults: settings.
        timeout_s: deadline of every wait, in seconds.
        stores: two clients of one torch store (one for the watchdog); default: env:// rendezvous.

    Raises:
        AlreadyInitialized: this process is in a world. ArgumentError: the world size does not
        match nodes x ranks. UnknownBackend, BackendUnavailable. PlanMismatch: ranks were started
        with different options. Timeout: a rank did not come. PeerFailure: a rank failed.
    """
    if _Current.world is not None:
        raise AlreadyInitialized("this process is already in a world; call mkernel.finalize() first")
    settings = settings or Settings()
    if timeout_s is not None:
        if timeout_s <= 0:
            raise ArgumentError("timeout_s", timeout_s, "a number of seconds above 0")
        settings = settings.model_copy(update={"timeout_s": timeout_s})
    identity = _identity(nodes if nodes is not None else settings.nodes, ranks_per_node)
    apart = identity.nodes > 1
    backends = Backends(
        accelerator or settings.accelerator,
        (nic or settings.nic) if apart else None,
        (verbs or settings.verbs) if apart else None,
    )
    _Current.generation += 1
    prefix = "/".join(
        ["mkernel", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), str(_Current.generation)]
    )
    one, two = stores or _rendezvous(identity)
    _Current.world = World(
        identity, backends, settings, (PrefixStore(prefix, one), PrefixStore(prefix, two))
    )
    return _Current.world


def finalize(error: BaseException | None = None) -> None:
    """Leave the world and free all it holds; harmless without one.

    Args:
        error: why this rank stops early; the others then raise PeerFailure instead of waiting.
    """
    world, _Current.world = _Current.world, None
    if world is not None:
        world.close(error)


def current() -> World:
    """The world of this process. NotInitialized."""
    if _Current.world is None:
        raise NotInitialized("no world; call mkernel.init() first, or run inside mkernel.launch(...)")
    return _Current.world


def is_initialized() -> bool:
    """Whether this process is in a world."""
    return _Current.world is not None


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
