"""The places of a world's ranks, and the routes between them; computed once and shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mkernel.topology.cost import LinkConstants, MachineConstants
from mkernel.topology.kinds import NodeKinds, node_kinds
from mkernel.topology.lanes import ANY_NIC, NicPlan, NicUse, nic_schedule
from mkernel.topology.model import Accelerator, Topology
from mkernel.topology.placement import NOT_PINNED, Pinning, WorldPlacement, place
from mkernel.topology.routes import SharedLinks
from mkernel.topology.routing import routes
from mkernel.topology.sources.chips import architecture, cores, is_named, is_product


@dataclass(frozen=True)
class WorldMap:
    """A world's kinds of nodes, placement, routes and links. A pure function of a topology: maps of
    equal inputs are equal, and each part is computed on first use.

    Attributes:
        kinds: the world's nodes.
        constants: constants of its machines. None: none are known, and links count as they are
            rated.
        group: a process group carries data between nodes, so that ranks have no NICs.
        pinning: the part of the placement that the user fixed.
        nics: the use of the world's NIC backend in plans.
    """

    kinds: NodeKinds
    ranks_per_node: int
    constants: MachineConstants | None
    group: bool = False
    pinning: Pinning = NOT_PINNED
    nics: NicUse = ANY_NIC

    def __hash__(self) -> int:
        # Plans are looked up by this hash, and machines are expensive to hash. Maps of one size are
        # compared.
        return hash((self.nodes, self.ranks_per_node, self.group))

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.kinds.of)

    @cached_property
    def cores(self) -> int | None:
        """The cores of the smallest of the nodes' real chips, as many as the constants state where
        nobody counted; None: there are none, or some number is unknown."""
        usual = None if self.constants is None else self.constants.cores
        every = [cores(one) or usual for one in _real(self.kinds)]
        known = [count for count in every if count is not None]
        return min(known) if known and len(known) == len(every) else None

    @cached_property
    def placement(self) -> WorldPlacement:
        """The placement of every rank, with NICs if there are several nodes and no process group.
        ArgumentError, as :func:`mkernel.topology.placement.place`."""
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
        """The plan that NIC sessions follow, if they carry data between nodes. NoRoute, as
        ``links``."""
        table = self.links.table
        schedule = nic_schedule(self.nics, several_rails=table.several_rails)
        return NicPlan(self.placement, table, schedule)

    @cached_property
    def links(self) -> SharedLinks:
        """The routes of all ordered pairs of ranks, and the links that they cross, if ranks send by
        themselves; detours are used only where there is no other way. NoRoute: a pair has none."""
        return self._links(group=False)

    @cached_property
    def group_links(self) -> SharedLinks:
        """The routes and links if a process group carries everything."""
        return self._links(group=True)

    @cached_property
    def fastest_links(self) -> SharedLinks:
        """The routes and links if ranks also relay for each other wherever that is fastest, which
        no backend does today."""
        return self._links(group=False, detours=True)

    def _links(self, *, group: bool, detours: bool = False) -> SharedLinks:
        rates = self.constants or LinkConstants()
        table = routes(self.kinds, self.placement, rates, group=group, detours=detours)
        return SharedLinks(table, self.placement)


def world_map(
    topology: Topology,
    ranks_per_node: int,
    constants: MachineConstants | Sequence[MachineConstants] | None,
    *,
    group: bool = False,
    pinning: Pinning = NOT_PINNED,
    nics: NicUse = ANY_NIC,
) -> WorldMap:
    """Return the map of these nodes, each with ``ranks_per_node`` ranks; the rest is as in
    :class:`WorldMap`. Of several ``constants`` those of the nodes' devices are taken
    (:func:`constants_of`)."""
    kinds = node_kinds(topology)
    every = (constants,) if isinstance(constants, MachineConstants) else constants or ()
    return WorldMap(kinds, ranks_per_node, constants_of(_real(kinds), every), group, pinning, nics)


def constants_of(
    devices: Sequence[Accelerator], every: Sequence[MachineConstants]
) -> MachineConstants | None:
    """Return those of several constants that hold for real devices: those of a device's product, or
    if its name states none, the first of its architecture. Of unlike devices the slowest counts, and
    if there are none, the first constants. None: some device has none, as no product stands in for
    another one."""
    found = [_of_device(one, every) for one in devices] or [next(iter(every), None)]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    return min(known, key=speed)


def speed(constants: MachineConstants) -> float:
    """Return the rate of bfloat16 products, in TFLOP/s, by which devices are faster or slower."""
    return constants.bfloat16_tflops_per_core * (constants.cores or 1)


def _real(kinds: NodeKinds) -> list[Accelerator]:
    """Return the devices of one node of each kind, without emulated ones."""
    return [one for node in kinds.prototypes for one in node.accelerators if not one.emulated]


def _of_device(device: Accelerator, every: Sequence[MachineConstants]) -> MachineConstants | None:
    chip, named = architecture(device), is_named(device)
    hold = [one for one in every if not one.architectures or chip in one.architectures]
    own = (one for one in hold if is_product(device, one.products))
    others = (one for one in hold if not (named and one.products and one.architectures))
    return next(own, next(others, None))
