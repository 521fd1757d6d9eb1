"""The join of a rank to its world: the ranks meet, see that they want the same, and open what calls
need.

Bootstrap → topology → accelerator → signal pad → process group or NIC session.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from mkernel import machine
from mkernel.backends import registry
from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.backends.contracts.nic import NicCapabilities, NicSession
from mkernel.errors import ArgumentError, BackendUnavailable, PlanMismatch, Timeout, Unsupported
from mkernel.plan.mixed import Side, name_of
from mkernel.plan.model import LaunchPlan, first_difference
from mkernel.plan.two_generation_cache import TwoGenerationCache
from mkernel.selection import SOFT, SYSTEM, TCP, nic_and_verbs, of_node
from mkernel.settings import PLANNED_SETTINGS, Settings
from mkernel.topology.model import Topology
from mkernel.version import __version__
from mkernel.world.agreement import admit_plan, admit_tensors
from mkernel.world.engine import Engine
from mkernel.world.environment import Chosen
from mkernel.world.exchange import Exchange
from mkernel.world.failure import FailureMonitor
from mkernel.world.heartbeats import HeartbeatTable
from mkernel.world.identity import Backends, Identity
from mkernel.world.memory import gone_before_mapped
from mkernel.world.mixed import Mixed, NodeCalls
from mkernel.world.process_group import GroupStore, group_store
from mkernel.world.watchdog import Peer, host_identity

_SAME_ON_ALL_RANKS = (
    "start every rank with the same options and settings. What is left to `auto` each rank chooses "
    "from its own machine: name it where machines differ (MKERNEL_ACCELERATOR, MKERNEL_NIC, "
    "MKERNEL_VERBS)"
)
_OF_A_NODE = ("accelerator", "companions", "nic", "verbs")
"""The choices that each of unlike nodes makes for itself."""
_SAME_VERSION = (
    "install the same version of mkernel on every host; `mkernel --version` says which one it has"
)


class Membership:
    """All that one rank opens to take part in a world, from ``join`` to ``leave``.

    Attributes:
        topology: the machines; the same on every rank.
        engines: by the names of their accelerators, the world's own first.
        mixed: whether its nodes have unlike accelerators or NICs.
        session: what carries puts between nodes; None where none are.

    Args:
        name: the world's.
        device: that this rank uses; None: it is placed on one.
        failure: is told of each part as it opens, so that a failure meanwhile ends its waits.
    """

    topology: Topology
    session: NicSession | None = None
    mixed = False

    def __init__(
        self,
        name: str,
        device: Chosen | None,
        identity: Identity,
        backends: Backends,
        settings: Settings,
        exchange: Exchange,
        failure: FailureMonitor,
    ) -> None:
        self._name = name
        self._device = device
        self._me = identity
        self._backends = backends
        self._settings = settings
        self._exchange = exchange
        self._failure = failure
        self._undo = contextlib.ExitStack()
        self._own_plans: TwoGenerationCache[int, LaunchPlan] = (
            TwoGenerationCache()
        )  # by id, which no other has meanwhile
        self._regions = itertools.count()
        self.engines: dict[str, Engine] = {}
        self._table: HeartbeatTable | None = None

    @property
    def engine(self) -> Engine:
        """Return the engine that the world was made with."""
        return self.engines[self._backends.accelerator]

    def join(self) -> None:
        """Meet the other ranks and open everything that calls need. Collective.

        What fails is told to the others and closes what is open; raised is the first cause.
        """
        try:
            self._open()
        except BaseException as error:
            self._failure.tell(error)
            with contextlib.suppress(Timeout):  # a thread may not end; the first error counts
                self.leave()
            self._failure.raise_first_cause(error)
            raise

    @cached_property
    def group_store(self) -> GroupStore:
        """Return the store through which a process group of these ranks may exchange addresses."""
        return group_store(self._failure)

    def _open(self) -> None:
        peers = self._meet()
        self._one_host = len({peer.host for peer in peers.values()}) == 1
        self._check_hosts(peers)
        self._failure.watch(peers, self._heartbeat_table(), self._settings.heartbeat_s)

        machine.usable_accelerator(self._backends.accelerator)
        if self.mixed:
            self._agree_on_wire()
        own = self._backends
        if own.nic is not None and own.verbs is not None:
            machine.usable_nic(own.nic, own.verbs)  # or a node without one says nothing of why
        self.topology = self._gather_topology(peers)
        if self.mixed:
            self._open_mixed()
            return
        for name in own.accelerators:
            nics = (own.nic, own.verbs) if name == own.accelerator else (None, None)
            self.engines[name] = Engine(
                Backends(name, *nics), self.topology, self._me, self._settings
            )
            self._check_companion(self.engines[name])
        self.engine.open(self._exchange, self._failure, self._regions)
        if self.engine.claims.process_group:
            self._join_group(self.engine, "")
        elif own.nic is not None and own.verbs is not None:
            self._open_nic(own.nic, own.verbs)

    def _agree_on_wire(self) -> None:
        """Choose the NIC between unlike nodes, the same on all of them: their own, or TCP where these
        are unlike too. Collective. PlanMismatch: one NIC on different providers."""
        own, me = self._backends, self._me
        named = of_node("nic", own.nic or self._settings.nic, me.node, me.nodes)
        nic, verbs = nic_and_verbs(self._settings, named, own.verbs)
        told = self._exchange.gather("wire", [nic, verbs])
        for other in range(me.size):
            if told[other][0] == nic and told[other][1] != verbs:
                values = verbs, told[other][1]
                raise PlanMismatch((me.rank, other), "world.verbs", values, _SAME_ON_ALL_RANKS)
        if any(each[0] != nic for each in told.values()):
            nic, verbs = TCP
        self._backends = Backends(own.accelerator, nic, verbs)

    def _open_mixed(self) -> None:
        """Open a world of unlike nodes: the node's own backend, and the wire to the others."""
        me, own = self._me, self._backends
        node = NodeCalls(own.accelerator, self.topology, me, self._settings)
        self.engines[own.accelerator] = node.engine  # closed and freed as any
        self._exchange.publish(f"side/{me.rank}", node.side().model_dump(mode="json"))
        firsts = [each * me.ranks_per_node for each in range(me.nodes)]
        sides = self._exchange.collect("side", firsts)
        known = tuple(Side.model_validate(sides[first]) for first in firsts)
        node.open(self._failure, self.group_store, self._name, self._undo)
        self._backends = Backends(name_of(known), own.nic, own.verbs)
        engine = Engine(self._backends, self.topology, me, self._settings, Mixed(known, me, node))
        self.engines[self._backends.accelerator] = engine
        engine.open(self._exchange, self._failure, self._regions)
        assert own.nic is not None
        assert own.verbs is not None
        self._open_nic(own.nic, own.verbs)

    @property
    def backends(self) -> Backends:
        """Return the names of what the world runs on, of unlike nodes those of all."""
        return self._backends

    def open(self, engine: Engine) -> None:
        """Open a companion. Collective. BackendUnavailable: it cannot run here."""
        try:
            machine.usable_accelerator(engine.backends.accelerator)
            engine.open(self._exchange, self._failure, self._regions)
            self._join_group(engine, engine.backends.accelerator)
        except BaseException as error:
            self._failure.tell(error)
            self._failure.raise_first_cause(error)
            raise

    def leave(self) -> None:
        """Close what is open; also after ``join`` has failed. Timeout: a thread of it does not end."""
        newest_first = list(reversed(self.engines.values()))
        ended = closed = False
        try:
            self._failure.stop()
            ended = True
        finally:
            quiet = [engine.close() for engine in newest_first]
            try:
                self._undo.close()  # the session before the memory that is registered with it
                closed = True
            finally:  # of a thread that does not end: it may still write there
                for engine, still in zip(newest_first, quiet, strict=True):
                    engine.free(quiet=still and closed and ended)
                self.session = self._table = None
                self.__dict__.pop("group_store", None)
                self._failure.close()

    def check(self, plan: LaunchPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse a plan of another world or of other tensors (:mod:`mkernel.world.agreement`)."""
        engine = self.engines.get(plan.accelerator, self.engine)
        if self._own_plans[id(plan)] is not plan:
            admit_plan(plan, engine.map, engine.backends, engine.accelerator)
        admit_tensors(plan, tensors, engine.claims)

    def planned(self, plan: LaunchPlan) -> None:
        """Remember a plan that was made for this world, and so is of no other."""
        self._own_plans[id(plan)] = plan

    def _join_group(self, engine: Engine, companion: str) -> None:
        """Join an engine's process group. ``companion``: the engine's name; empty: it is none."""
        engine.join_group(
            self.group_store,
            prefix=companion,
            name=f"mkernel/{self._name}" + (f"/{companion}" if companion else ""),
            one_host=self._one_host,
            undo=self._undo,
        )

    def _check_companion(self, engine: Engine) -> None:
        """Raise Unsupported where an engine cannot run beside the world's own accelerator."""
        name, own = engine.backends.accelerator, self.engine
        device = engine.accelerator.device
        if device != own.accelerator.device:
            raise Unsupported(
                f"accelerator {name!r} takes tensors on {device!r}, and {self._backends.accelerator!r} "
                f"on {own.accelerator.device!r}: one world has one kind of device; leave one of them "
                "out of accelerator="
            )
        if engine is not own and self._me.nodes > 1 and not engine.claims.process_group:
            raise Unsupported(
                f"accelerator {name!r} puts through a NIC between nodes, which only the first "
                f"accelerator of a world does; name it before {self._backends.accelerator!r}"
            )

    # ---- meeting -------------------------------------------------------------------------------

    def _meet(self) -> dict[int, Peer]:
        """Wait for every rank's hello, check that all are of the same world, and return the ranks."""
        world = {
            "mkernel": __version__,
            "nodes": self._me.nodes,
            "ranks_per_node": self._me.ranks_per_node,
            "accelerator": self._backends.accelerator,
            "companions": list(self._backends.companions),
            "nic": self._backends.nic,
            "verbs": self._backends.verbs,
            "nic_settings": self._settings.nic_settings.model_dump(include=PLANNED_SETTINGS),
        }
        rank = self._me.rank
        if self._me.local_rank == 0:
            self._table = HeartbeatTable.create(self._node_ranks)
            self._undo.callback(self._table.close)
        self._exchange.publish(
            f"hello/{rank}",
            {
                "host": host_identity(),
                "pid": os.getpid(),
                "device": self._own_device(),
                "heartbeats": None if self._table is None else self._table.export(),
                "world": world,
            },
        )
        hellos = self._exchange.collect("hello")
        for other in range(
            self._me.size
        ):  # first: what else a version says may have another meaning
            versions = __version__, _version_in(hellos[other])
            if versions[1] not in (None, versions[0]):
                raise PlanMismatch((rank, other), "world.mkernel", versions, _SAME_VERSION)
        peers = {other: Peer.from_hello(other, told) for other, told in hellos.items()}
        told = {other: hellos[other]["world"] for other in range(self._me.size)}
        # Unlike accelerators, or NICs, are nodes of their own, and choose what else is theirs.
        kinds = {(each["accelerator"], each["nic"]) for each in told.values()}
        self.mixed = len(kinds) > 1
        for other, each in told.items():
            elsewhere = self.mixed and other not in self._node_ranks
            own = {name: world[name] for name in _OF_A_NODE} if elsewhere else {}
            found = first_difference(world, {**each, **own}, "world")
            if found:
                raise PlanMismatch(
                    (rank, other), found[0], (found[1], found[2]), _SAME_ON_ALL_RANKS
                )
        self._kinds = [
            str(told[node * self._me.ranks_per_node]["accelerator"])
            for node in range(self._me.nodes)
        ]
        self._devices = {other: told.get("device") for other, told in hellos.items()}
        self._exported_table = hellos[self._node_ranks[0]].get("heartbeats")
        return peers

    @property
    def _node_ranks(self) -> range:
        """Return the ranks of this rank's node."""
        each = self._me.ranks_per_node
        return range(self._me.node * each, (self._me.node + 1) * each)

    def _heartbeat_table(self) -> HeartbeatTable:
        """Return the table of this rank's node, which the node's first rank has made.

        Raises:
            PeerFailure: that rank is gone. OSError: its memory cannot be mapped.
        """
        if self._table is None:
            ranks = self._node_ranks
            try:
                self._table = HeartbeatTable.attach(self._exported_table, ranks)
            except OSError as error:
                self._failure.look_for_abort()  # a rank that has failed takes its memory along
                if isinstance(error, FileNotFoundError | ProcessLookupError):
                    raise gone_before_mapped(ranks[0], error) from error
                raise
            self._undo.callback(self._table.close)
        return self._table

    def _own_device(self) -> tuple[str | None, int] | None:
        if self._device is None or self._settings.pinning.accelerators:
            return None
        return self._device.described(registry.accelerator(self._backends.accelerator))

    def _check_hosts(self, peers: Mapping[int, Peer]) -> None:
        for rank, peer in peers.items():
            first = rank - rank % self._me.ranks_per_node
            if peer.host != peers[first].host:
                raise ArgumentError(
                    "nodes",
                    self._me.nodes,
                    "a number of nodes such that each node's ranks are on one host",
                    why=f"ranks {first} and {rank} of one node are on different hosts",
                )

    def _gather_topology(self, peers: Mapping[int, Peer]) -> Topology:
        """Assemble the same model on every rank, of nodes that each node's first rank describes."""
        me = self._me
        if me.local_rank == 0:
            here = [
                node
                for node in range(me.nodes)
                if peers[node * me.ranks_per_node].host == peers[me.rank].host
                and self._kinds[node] == self._kinds[me.node]  # others have devices of their own
            ]
            used = [
                self._devices[rank]
                for node in here
                for rank in range(node * me.ranks_per_node, (node + 1) * me.ranks_per_node)
            ]
            whole = machine.seated(machine.machine_topology(self._backends), used)
            split = machine.emulated_topology(
                whole, self._backends, len(here), me.ranks_per_node, self._settings
            )
            own = split.nodes[here.index(me.node)].model_copy(update={"id": me.node})
            self._exchange.publish(f"topology/{me.node}", own.model_dump(mode="json"))
        nodes = self._exchange.collect("topology", range(me.nodes))
        return Topology.model_validate({"nodes": [nodes[node] for node in range(me.nodes)]})

    # ---- the way between nodes -----------------------------------------------------------------

    def _open_nic(self, name: str, verbs: str) -> None:
        me, settings = self._me, self._settings
        if verbs == SOFT and not self._one_host:
            raise BackendUnavailable(
                f"verbs {SOFT!r} joins processes of one host, and the ranks are on several; bring an "
                "RDMA device up on each (`mkernel doctor` says what is missing) and use verbs "
                f"{SYSTEM!r}, which `auto` takes where it finds one"
            )
        engine = self.engine
        lanes = engine.map.nic_plan.of_rank(me.rank, self.topology.nodes[me.node].nics)
        session = registry.nic(name).open(verbs, lanes, settings.nic_settings)
        self._undo.callback(session.close)
        if session.fifo == 0:
            raise BackendUnavailable(
                f"nic {name!r} takes puts from the host only (it has no command FIFO), and the "
                f"kernels of accelerator {self._backends.accelerator!r} push theirs into one; use "
                "another NIC"
            )
        far = [rank for rank, node in enumerate(me.node_of) if node != me.node]
        for peer in far:
            self._exchange.publish(f"nic/{peer}/{me.rank}", session.address(peer))
        addresses = self._exchange.collect(f"nic/{me.rank}", far)
        for peer in far:
            session.connect(peer, addresses[peer])
        session.start(engine.heap.pad, engine.map.placement[me.rank].proxy_cpus)
        self.session = engine.heap.session = self._failure.session = session
        engine.heap.staged = engine.map.links.table.staged and not self.mixed
        _check_reach(engine.accelerator, name, session.capabilities(), staged=engine.heap.staged)
        self._exchange.barrier()  # nobody puts before every queue pair is ready to receive


def _version_in(hello: Any) -> str | None:
    """Return the version of mkernel that wrote a hello; None: it names none, or nobody of ours wrote
    it."""
    world = hello.get("world") if isinstance(hello, dict) else None
    version = world.get("mkernel") if isinstance(world, dict) else None
    return version if isinstance(version, str) else None


def _check_reach(
    accelerator: AcceleratorBackend, nic: str, claims: NicCapabilities, *, staged: bool
) -> None:
    """Raise BackendUnavailable where the NIC is to read and write memory of the accelerator's devices,
    and cannot register it."""
    access = None if staged else accelerator.nic_access()
    if access is None or claims.reaches_device(exports_dmabuf=access.usable):
        return
    raise BackendUnavailable(
        f"nic {nic!r} cannot register memory of accelerator {accelerator.name!r}: the device is "
        f"{access.detail}, and the NIC takes {'dmabufs' if claims.dmabuf else 'no dmabufs'} and has no "
        "peermem module; MKERNEL_NIC_SETTINGS__GPUDIRECT=0 on all ranks stages what it carries in host "
        "memory"
    )
