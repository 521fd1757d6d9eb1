"""Routes between ranks as data, kept once for all equal pairs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from mkernel.topology.model import Model
from mkernel.topology.placement import WorldPlacement

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
    own.
    """

    kind: RouteKind
    rails: tuple[Rail, ...] = ()
    src_relay: int | None = Field(None, ge=0)
    dst_relay: int | None = Field(None, ge=0)
    staged: tuple[Literal["source", "destination"], ...] = ()
    crosses: tuple[Crossed, ...] = ()
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
