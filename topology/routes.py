"""Routes between ranks as data, kept once for all equal pairs; and the links that a message occupies on
its way, and shares with others.

The closed-form predictions add the bytes on each link; the simulation lets messages queue for them.
Both read the same subflows, so that they can differ only by contention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from mkernel.topology.model import Model
from mkernel.topology.placement import Seat, WorldPlacement

RouteKind = Literal["p2p", "nic", "relay", "host", "group"]


class Rail(Model):
    """A NIC of the sending node, and the NIC of the receiving node at which its writes arrive."""

    src_nic: str
    dst_nic: str
    bandwidth_gbs: float = Field(gt=0, description="GB/s, one direction")


class Crossed(Model):
    """A link inside a node that other pairs' bytes cross too, in one direction."""

    name: str
    gbs: float = Field(gt=0)


class Way(Model):
    """The way bytes travel.

    ``p2p``: over the scale-up fabric. ``host``: inside a node through host memory, if devices do
    not reach each other. ``nic``: by NICs. ``relay``: by NICs of a neighbour that the scale-up
    fabric reaches, on one side or both. ``group``: as a process group carries them, in a node or
    between nodes; it finds its own way.

    ``src_relay``, ``dst_relay`` are local ranks. ``staged``: the sides on which bytes rest in host
    memory, because the NIC cannot read or write the device's. ``crosses``: inside a node, the links
    of known rate that a pair crosses in place of the ports of a switch: PCIe links, or the pair's
    own. ``over_pcie``: no scale-up link joins a pair of one node, and its rates are modelled (the
    section ``paths`` of ``data/links.json``).
    """

    kind: RouteKind
    rails: tuple[Rail, ...] = ()
    src_relay: int | None = Field(None, ge=0)
    dst_relay: int | None = Field(None, ge=0)
    staged: tuple[Literal["source", "destination"], ...] = ()
    crosses: tuple[Crossed, ...] = ()
    over_pcie: bool = False
    fabric_gbs: float | None = Field(None, gt=0, description="of the hop to or from a relay")
    bandwidth_gbs: float = Field(gt=0, description="GB/s, one direction, all rails together")
    latency_us: float = Field(ge=0)

    @property
    def taken(self) -> bool:
        """True if some backend takes such ways: none relays, or stages in host memory what it sends
        inside a node."""
        return self.kind not in ("relay", "host")

    @model_validator(mode="after")
    def _consistent(self) -> Way:
        relayed = self.src_relay is not None or self.dst_relay is not None
        if bool(self.rails) != (self.kind in ("nic", "relay")) or relayed != (self.kind == "relay"):
            raise ValueError(
                f"a route of kind {self.kind!r} with {len(self.rails)} rails and relays "
                f"{self.src_relay}, {self.dst_relay}"
            )
        return self


class Route(Way):
    """The way from rank ``src`` to rank ``dst``."""

    src: int = Field(ge=0)
    dst: int = Field(ge=0)


class Ends(NamedTuple):
    """A class of ordered pairs: site and local rank on either side, inside one node or between two."""

    src_site: int
    src_local: int
    dst_site: int
    dst_local: int
    within: bool


class RouteClass(Way):
    """The way of all ordered pairs between equal ends; ``pairs`` is the number of them."""

    src_site: int = Field(ge=0)
    src_local: int = Field(ge=0)
    dst_site: int = Field(ge=0)
    dst_local: int = Field(ge=0)
    within: bool = Field(description="both ranks on one node")
    pairs: int = Field(ge=1)

    @property
    def ends(self) -> Ends:
        """The ends that the class joins."""
        return Ends(self.src_site, self.src_local, self.dst_site, self.dst_local, self.within)

    @property
    def way(self) -> dict[str, object]:
        """The fields of :class:`Way`."""
        return {name: getattr(self, name) for name in Way.model_fields}


class RouteTable(Model):
    """The routes of all ordered pairs of ranks."""

    classes: tuple[RouteClass, ...] = ()
    egress_gbs: tuple[float | None, ...] = Field(
        (),
        description="by site: what a rank sends to all of its node together; None: a link a peer",
    )

    @cached_property
    def by_ends(self) -> Mapping[Ends, RouteClass]:
        """The classes, by their ends."""
        return {one.ends: one for one in self.classes}

    @cached_property
    def _fits(self) -> list[WorldPlacement]:
        """The placements that were found to have these routes."""
        return []

    @cached_property
    def untaken(self) -> tuple[RouteClass, ...]:
        """The classes whose ways no backend takes."""
        return tuple(one for one in self.classes if not one.taken)

    @cached_property
    def by_group(self) -> bool:
        """True if a process group carries what some pair of ranks exchanges."""
        return any(one.kind == "group" for one in self.classes)

    @property
    def several_rails(self) -> bool:
        """True if some ranks are joined by more than one rail."""
        return any(len(one.rails) > 1 for one in self.classes)

    @property
    def staged(self) -> bool:
        """True if data that NICs carry rests in host memory on some side of some pair of ranks."""
        return any(one.staged for one in self.classes if not one.within)

    def route(self, placement: WorldPlacement, src: int, dst: int) -> Route:
        """Return the route of an ordered pair. KeyError: ``src == dst``, or out of range."""
        world = len(placement)
        if src == dst or not (0 <= src < world and 0 <= dst < world):
            raise KeyError(f"no route from rank {src} to rank {dst} in a world of {world}")
        (here, i), (there, j) = (divmod(rank, placement.ranks_per_node) for rank in (src, dst))
        ends = Ends(placement.site_of(here), i, placement.site_of(there), j, here == there)
        return Route(src=src, dst=dst, **self.by_ends[ends].way)

    def check(self, placement: WorldPlacement) -> None:
        """Raise ValueError if a pair of the world's ranks has no route, or one too many."""
        if any(one is placement for one in self._fits):
            return  # each plan of a world checks again
        wanted = pair_classes(placement)
        found = {one.ends: one.pairs for one in self.classes}
        if found != wanted or len(self.classes) != len(wanted):
            wrong = sorted(found.items() ^ wanted.items())
            raise ValueError(
                "routes must hold every ordered pair of ranks once; look at "
                f"{wrong[0][0] if wrong else 'a class that occurs twice'}"
            )
        self._fits.append(placement)


def pair_classes(placement: WorldPlacement) -> dict[Ends, int]:
    """Return all classes of ordered pairs of a world, in order, with the number of pairs of each."""
    locals_ = range(placement.ranks_per_node)
    counts = [site.count for site in placement.sites]
    found: dict[Ends, int] = {}
    for a, here in enumerate(counts):
        for i in locals_:
            found |= {Ends(a, i, a, j, True): here for j in locals_ if i != j}
            for b, there in enumerate(counts):
                pairs = here * (there - (a == b))
                found |= {Ends(a, i, b, j, False): pairs for j in locals_ if pairs}
    return found


class Link(NamedTuple):
    """One direction of something that bytes cross, on every node of a site."""

    site: int
    name: str


class Subflow(NamedTuple):
    """A part of a message that travels by itself: ``share`` of its bytes, over ``links`` in order;
    ``src_links`` of them are on the sending node."""

    share: float
    links: tuple[tuple[Link, float], ...]
    src_links: int


def subflows(
    route: RouteClass, table: RouteTable, placement: WorldPlacement
) -> tuple[Subflow, ...]:
    """Return the subflows of a big message, each link with its rate in GB/s."""
    here = placement.sites[route.src_site].seats
    there = placement.sites[route.dst_site].seats
    if route.kind == "group" and not route.within:
        out = Link(route.src_site, f"{here[route.src_local].accelerator} out")
        into = Link(route.dst_site, f"{there[route.dst_local].accelerator} in")
        rate = route.bandwidth_gbs
        return (Subflow(1.0, ((out, rate), (into, rate)), 1),)
    if not route.rails:
        links = tuple((Link(route.src_site, one.name), one.gbs) for one in route.crosses)
        if not links and route.kind == "host":
            links = _staging(route, "source", route.src_site, here[route.src_local].accelerator)
        elif not links:
            links = _fabric(table, route, route.src_site, here, route.src_local, route.dst_local)
        return (Subflow(1.0, links, len(links)),)
    total = sum(rail.bandwidth_gbs for rail in route.rails)
    before = _device(route, total, route.src_site, here, route.src_local, "out")
    if route.src_relay is not None:
        before += _fabric(table, route, route.src_site, here, route.src_local, route.src_relay)
    before += _staging(route, "source", route.src_site, here[route.src_local].accelerator)
    after = _staging(route, "destination", route.dst_site, there[route.dst_local].accelerator)
    if route.dst_relay is not None:
        after += _fabric(table, route, route.dst_site, there, route.dst_relay, route.dst_local)
    after += _device(route, total, route.dst_site, there, route.dst_local, "in")
    return tuple(
        Subflow(
            rail.bandwidth_gbs / total,
            (
                *before,
                (Link(route.src_site, f"{rail.src_nic} out"), rail.bandwidth_gbs),
                (Link(route.dst_site, f"{rail.dst_nic} in"), rail.bandwidth_gbs),
                *after,
            ),
            len(before) + 1,
        )
        for rail in route.rails
    )


def capacities(all_subflows: Sequence[tuple[Subflow, ...]]) -> dict[Link, float]:
    """Return the rate of each link in GB/s: that of the fastest route over it. A slow peer delays
    only its own link."""
    found: dict[Link, float] = {}
    for subflow in (subflow for own in all_subflows for subflow in own):
        for link, gbs in subflow.links:
            found[link] = max(gbs, found.get(link, 0.0))
    return found


class SharedLinks:
    """The links of a world, and the loads that its routes put on them."""

    def __init__(self, table: RouteTable, placement: WorldPlacement) -> None:
        self.table = table
        self.placement = placement
        every = [subflows(route, table, placement) for route in table.classes]
        self._rates = capacities(every)
        self._shares: list[list[tuple[Link, float]]] = [  # of a class' bytes, on each node
            [
                (link, subflow.share * route.pairs / placement.sites[link.site].count)
                for subflow in own
                for link, _ in subflow.links
            ]
            for route, own in zip(table.classes, every, strict=True)
        ]

    @cached_property
    def egress_gbs(self) -> float | None:
        """The GB/s that each rank sends to all others of its node together if all send alike; None:
        it sends to none."""
        nbytes = self.placement.ranks_per_node - 1
        loads = self.loads(lambda route: float(route.within))
        busy = max((carried / gbs for carried, gbs, _ in loads), default=0.0)
        return nbytes / busy if busy else None

    def loads(self, sent: Callable[[RouteClass], float]) -> Iterator[tuple[float, float, float]]:
        """Yield (bytes, GB/s, longest latency of its routes) of each link that carries anything, if
        the pairs of a class each send ``sent`` bytes."""
        total: defaultdict[Link, float] = defaultdict(float)
        latency: defaultdict[Link, float] = defaultdict(float)
        for route, shares in zip(self.table.classes, self._shares, strict=True):
            nbytes = sent(route)
            for link, share in shares if nbytes else ():
                total[link] += share * nbytes
                latency[link] = max(latency[link], route.latency_us)
        for link, nbytes in total.items():
            yield nbytes, self._rates[link], latency[link]


def egress_gbs(table: RouteTable, placement: WorldPlacement) -> float | None:
    """Return :attr:`SharedLinks.egress_gbs` of such links; plans of one world share the cached
    value."""
    key = table.fingerprint, placement.fingerprint
    if key not in _egress_gbs:
        if len(_egress_gbs) == _MOST_KNOWN:
            _egress_gbs.clear()
        _egress_gbs[key] = SharedLinks(table, placement).egress_gbs
    return _egress_gbs[key]


_MOST_KNOWN = 64
_egress_gbs: dict[tuple[str, str], float | None] = {}

_Links = tuple[tuple[Link, float], ...]


def _fabric(
    table: RouteTable, route: Way, site: int, seats: Sequence[Seat], i: int, j: int
) -> _Links:
    """Return the links from one local rank to another: both ports of the switch, or the pair's own
    link."""
    gbs = route.fabric_gbs or route.bandwidth_gbs
    one, other = seats[i].accelerator, seats[j].accelerator
    egress = table.egress_gbs[site] if table.egress_gbs else None
    if egress is None:
        return ((Link(site, f"{one} → {other}"), gbs),)
    return (
        (Link(site, f"{one} egress"), egress),
        (Link(site, f"{other} ingress"), egress),
    )


def _staging(route: Way, side: str, site: int, accelerator: str) -> _Links:
    if side not in route.staged:
        return ()
    return (
        (
            Link(site, f"{accelerator} host {'out' if side == 'source' else 'in'}"),
            route.bandwidth_gbs,
        ),
    )


def _device(
    route: Way, rails_gbs: float, site: int, seats: Sequence[Seat], local: int, direction: str
) -> _Links:
    """Return the device's own link, if that and not the NICs is the limit."""
    if route.bandwidth_gbs >= rails_gbs or route.staged or route.kind == "relay":
        return ()
    return ((Link(site, f"{seats[local].accelerator} {direction}"), route.bandwidth_gbs),)
