"""Where the ranks of a world are, and how bytes go between them: found once, read by everyone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mkernel.topology.cost import LinkConstants, MachineConstants
from mkernel.topology.kinds import NodeKinds, node_kinds
from mkernel.topology.lanes import ANY_NIC, NicPlan, NicUse, nic_schedule
from mkernel.topology.model import Topology
from mkernel.topology.placement import NOT_PINNED, Pinning, WorldPlacement, place
from mkernel.topology.routing import routes
from mkernel.topology.shared_links import SharedLinks
from mkernel.topology.sources.chips import architecture, cores


@dataclass(frozen=True)
class WorldMap:
    """A world's kinds of nodes, placement, routes and links. A pure function of a topology: maps of
    equal inputs are equal, and each part is found when it is first asked for.

    Attributes:
        kinds: the world's nodes.
        constants: of its machines. None: nobody knows any, and links are as they are rated.
        group: a process group carries what crosses nodes, so that ranks have no NICs.
        pinning: what the user decided of the placement.
        nics: what plans make of the world's NIC backend.
    """

    kinds: NodeKinds
    ranks_per_node: int
    constants: MachineConstants | None
    group: bool = False
    pinning: Pinning = NOT_PINNED
    nics: NicUse = ANY_NIC

    def __hash__(self) -> int:
        # Plans are looked up by it, and machines are much to hash. Maps of one size are compared.
        return hash((self.nodes, self.ranks_per_node, self.group))

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.kinds.of)

    @cached_property
    def cores(self) -> int | None:
        """Of the smallest of the nodes' real chips; None: there are none, or one's are not known."""
        every = [
            cores(one)
            for node in self.kinds.prototypes
            for one in node.accelerators
            if not one.emulated
        ]
        known = [count for count in every if count is not None]
        return min(known) if known and len(known) == len(every) else None

    @cached_property
    def placement(self) -> WorldPlacement:
        """Of every rank; with NICs where there are several nodes and no process group. ArgumentError,
        as :func:`mkernel.topology.placement.place`."""
        nics = self.nodes > 1 and not self.group
        return place(
            self.kinds,
            self.ranks_per_node,
            nics=nics,
            pinning=self.pinning,
            most_rails=self.nics.rails,
        )

    @cached_property
    def nic_plan(self) -> NicPlan:
        """What NIC sessions follow, where they carry what crosses nodes. NoRoute, as ``links``."""
        table = self.links.table
        schedule = nic_schedule(self.nics, several_rails=table.several_rails)
        return NicPlan(self.placement, table, schedule)

    @cached_property
    def links(self) -> SharedLinks:
        """The routes of all ordered pairs of ranks, and the links that they cross, where ranks send by
        themselves, without detours where there is a way without. NoRoute: a pair has none."""
        return self._links(group=False)

    @cached_property
    def group_links(self) -> SharedLinks:
        """The same where a process group carries everything."""
        return self._links(group=True)

    @cached_property
    def fastest_links(self) -> SharedLinks:
        """The same where ranks also relay for each other, wherever that is fastest: what no backend
        does today."""
        return self._links(group=False, detours=True)

    def _links(self, *, group: bool, detours: bool = False) -> SharedLinks:
        rates = self.constants or LinkConstants()
        table = routes(self.kinds, self.placement, rates, group=group, detours=detours)
        return SharedLinks(table, self.placement)


def world_map(
    topology: Topology,
    ranks_per_node: int,
    constants: MachineConstants | None,
    *,
    group: bool = False,
    pinning: Pinning = NOT_PINNED,
    nics: NicUse = ANY_NIC,
) -> WorldMap:
    """The map of these nodes, each with so many ranks; the rest is as in :class:`WorldMap`.
    ``constants`` of other chips than the nodes have count as None: no chip stands in for another."""
    kinds = node_kinds(topology)
    known = constants if constants is None or _hold(constants, kinds) else None
    return WorldMap(kinds, ranks_per_node, known, group, pinning, nics)


def _hold(constants: MachineConstants, kinds: NodeKinds) -> bool:
    """Whether the constants are of the nodes' chips."""
    return not constants.architectures or all(
        architecture(one) in constants.architectures
        for node in kinds.prototypes
        for one in node.accelerators
        if not one.emulated
    )
