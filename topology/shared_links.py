"""The links that a message occupies on its way, and shares with others.

The closed-form predictions add the bytes on each link; the simulation lets messages queue for them.
Both read the same subflows, so that they can differ only by contention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from mkernel.topology.placement import Seat, WorldPlacement
from mkernel.topology.routes import RouteClass, RouteTable, Way


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
