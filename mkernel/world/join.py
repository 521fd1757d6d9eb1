"""How a rank joins its world: the ranks meet, see that they want the same, and open what calls need.

Bootstrap → topology → accelerator → signal pad → process group or NIC session.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import cached_property

import torch
from torch.distributed import ProcessGroup

from mkernel import machine
from mkernel.backends import registry
from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.backends.contracts.nic import NicSession
from mkernel.errors import ArgumentError, BackendUnavailable, PlanMismatch, Unsupported
from mkernel.plan import missing
from mkernel.plan.model import LaunchPlan, first_difference
from mkernel.plan.recent import Recent
from mkernel.selection import SOFT, SYSTEM, nic_use
from mkernel.settings import PLANNED_SETTINGS, Settings
from mkernel.topology.cost import constants_for
from mkernel.topology.model import Topology
from mkernel.topology.world_map import WorldMap, world_map
from mkernel.world.admission import admit_plan, admit_tensors
from mkernel.world.devices import Chosen
from mkernel.world.exchange import Exchange
from mkernel.world.failure import FailureMonitor
from mkernel.world.group_store import GroupStore
from mkernel.world.identity import Backends, Identity
from mkernel.world.memory import SymmetricHeap
from mkernel.world.process_group import group_store, open_group
from mkernel.world.watchdog import Peer, host_identity

DRAIN_S = 5.0
"""How long a rank that stops waits for what still runs on its device."""
_SAME_ON_ALL_RANKS = (
    "start every rank with the same options and settings. What is left to `auto` each rank chooses "
    "from its own machine: name it where machines differ (MKERNEL_ACCELERATOR, MKERNEL_NIC, "
    "MKERNEL_VERBS)"
)


class Membership:
    """What one rank opens to take part in a world, from ``join`` to ``leave``.

    Attributes:
        accelerator: an instance of this world's own, so that worlds of a process do not share one.
        topology, map: the machines, and where ranks and bytes go; the same on every rank.
        group, session: what carries the bytes between nodes; in a world of one node there may be none.

    Args:
        name: the world's.
        device: that this rank uses; None: it is placed on one.
        failure: is told of each part as it opens, so that a failure meanwhile ends its waits.
    """

    accelerator: AcceleratorBackend
    topology: Topology
    map: WorldMap
    heap: SymmetricHeap
    group: ProcessGroup | None = None
    session: NicSession | None = None

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
        self._own_plans: Recent[int, LaunchPlan] = Recent()  # by id, which no other has meanwhile

    def join(self) -> None:
        """Meet the other ranks and open everything that calls need. Collective.

        What fails is told to the others and closes what is open; raised is the first cause.
        """
        try:
            self._open()
        except BaseException as error:
            self._failure.tell(error)
            self.leave()
            self._failure.raise_first_cause(error)
            raise

    @cached_property
    def group_store(self) -> GroupStore:
        """The store through which a process group of these ranks may exchange addresses."""
        return group_store(self._failure)

    def _open(self) -> None:
        peers = self._meet()
        self._one_host = len({peer.host for peer in peers.values()}) == 1
        self._check_hosts(peers)
        self._failure.watch(peers, self._settings.heartbeat_s)

        machine.usable_accelerator(self._backends.accelerator)
        accelerator = registry.new_accelerator(self._backends.accelerator)
        claims = accelerator.capabilities()
        self.topology = self._gather_topology(peers)
        self.map = world_map(
            self.topology,
            self._me.ranks_per_node,
            constants_for(claims.constants, self._settings.constants),
            group=claims.process_group,
            pinning=self._settings.pinning,
            nics=nic_use(self._backends.nic, self._settings),
        )
        lacks = missing.of_world(self._backends.accelerator, claims, self.map.kinds)
        if lacks:
            raise Unsupported("; ".join(lacks))
        here = self.map.placement[self._me.rank].accelerator
        node = self.topology.nodes[self._me.node]
        accelerator.open(next(device for device in node.accelerators if device.id == here))
        self.accelerator = self._failure.accelerator = accelerator
        self.heap = SymmetricHeap(self._me, accelerator, self._exchange, self._failure)
        self._failure.guard(self.heap.pad)
        if claims.process_group:
            self.group = open_group(
                accelerator,
                self._me.rank,
                self._me.size,
                self.group_store,
                self._settings.timeout_s,
                name=f"mkernel/{self._name}",
                one_host=self._one_host,
                undo=self._undo,
            )
        elif self._backends.nic is not None and self._backends.verbs is not None:
            self._open_nic(self._backends.nic, self._backends.verbs)

    def leave(self) -> None:
        """Close what is open; also after ``join`` has failed."""
        self._failure.stop()
        opened = self._failure.accelerator
        quiet = opened is None or opened.close(DRAIN_S)
        self._undo.close()  # the session before the memory that is registered with it
        if hasattr(self, "heap"):
            self.heap.close(quiet=quiet)

    def check(self, plan: LaunchPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse a plan of another world or of other tensors (:mod:`mkernel.world.admission`)."""
        if self._own_plans[id(plan)] is not plan:
            admit_plan(plan, self.map, self._backends, self.accelerator)
        admit_tensors(plan, tensors, self.accelerator.capabilities())

    def planned(self, plan: LaunchPlan) -> None:
        """Know a plan that was made for this world, and so is of no other."""
        self._own_plans[id(plan)] = plan

    # ---- meeting -------------------------------------------------------------------------------

    def _meet(self) -> dict[int, Peer]:
        """All ranks, once each has said who it is and the same as this one about the world."""
        world = {
            "nodes": self._me.nodes,
            "ranks_per_node": self._me.ranks_per_node,
            "accelerator": self._backends.accelerator,
            "nic": self._backends.nic,
            "verbs": self._backends.verbs,
            "nic_settings": self._settings.nic_settings.model_dump(include=PLANNED_SETTINGS),
        }
        rank = self._me.rank
        self._exchange.publish(
            f"hello/{rank}",
            {
                "host": host_identity(),
                "pid": os.getpid(),
                "device": self._own_device(),
                "world": world,
            },
        )
        hellos = self._exchange.collect("hello")
        peers = {other: Peer.from_hello(other, told) for other, told in hellos.items()}
        for other in range(self._me.size):
            found = first_difference(world, hellos[other]["world"], "world")
            if found:
                raise PlanMismatch(
                    (rank, other), found[0], (found[1], found[2]), _SAME_ON_ALL_RANKS
                )
        self._devices = {other: told.get("device") for other, told in hellos.items()}
        return peers

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
        """Each node's first rank describes the node; every rank assembles the same model."""
        me = self._me
        if me.local_rank == 0:
            here = [
                node
                for node in range(me.nodes)
                if peers[node * me.ranks_per_node].host == peers[me.rank].host
            ]
            used = [
                self._devices[rank]
                for node in here
                for rank in range(node * me.ranks_per_node, (node + 1) * me.ranks_per_node)
            ]
            whole = machine.seated(machine.machine_topology(self._backends), used)
            split = machine.emulated_topology(
                whole, self._backends, len(here), me.ranks_per_node, self._settings.ranks_per_device
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
        backend = registry.nic(name)
        status = backend.status(verbs)
        if not status.usable:
            raise BackendUnavailable(f"nic {name!r} on {verbs!r}: {status.detail}; {status.remedy}")
        lanes = self.map.nic_plan.of_rank(me.rank, self.topology.nodes[me.node].nics)
        session = backend.open(verbs, lanes, settings.nic_settings)
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
        session.start(self.heap.pad, self.map.placement[me.rank].proxy_cpus)
        self.session = self.heap.session = self._failure.session = session
        self._exchange.barrier()  # nobody puts before every queue pair is ready to receive
