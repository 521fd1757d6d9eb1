"""The mapping of puts to ranks of other nodes onto ports and queue pairs, which NIC sessions
follow.

The routes state which ports two ranks use, rail by rail; :class:`NicSchedule` fixes the rest, for
all pairs of a world alike. A session opens exactly this and chooses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import Field

from mkernel.errors import Unsupported
from mkernel.topology.model import Model, Nic
from mkernel.topology.placement import WorldPlacement
from mkernel.topology.routes import RouteTable


class NicUse(Model):
    """The settings as limited by a NIC backend, before ports are known."""

    rails: int = Field(8, ge=1, description="ports that a rank uses, at most")
    queue_pairs: int = Field(1, ge=1, description="of two ranks on each of their rails")
    stripe_bytes: int = Field(1 << 18, ge=1, description="see NicSchedule")


ANY_NIC = NicUse()
"""The use of no backend in particular."""


class NicSchedule(Model):
    """The way a put travels between two ranks, the same for every pair.

    Two ranks are joined by ``queue_pairs`` on each rail of their route. Each queue pair is a
    *lane*: lane i lies on rail i modulo the number of rails. A put of ``stripe_bytes`` or more is
    cut into one piece for every lane, of equal sizes. A smaller one takes one lane whole: the next
    one *in turn* among the puts of this rank to that peer, in the order in which its proxy takes
    them.

    Turns are better than a lane computed from a put's place: of few equal chunks, which plans
    consist of, no lane gets two more than another, whichever blocks produced them, and strides of a
    plan cannot put all on one lane. The choice has no visible effect: lanes are not ordered against
    each other, and only a put's signal announces its bytes.
    """

    queue_pairs: int = Field(ge=1)
    stripe_bytes: int | None = Field(
        ge=1, description="None: no two ranks have several lanes, so nothing is cut"
    )
    small_puts: Literal["in turn"] = "in turn"


def nic_schedule(use: NicUse, *, several_rails: bool) -> NicSchedule:
    """Return the schedule of a world. ``several_rails``: some of its ranks are joined by more than
    one rail."""
    several = use.queue_pairs > 1 or several_rails
    return NicSchedule(
        queue_pairs=use.queue_pairs, stripe_bytes=use.stripe_bytes if several else None
    )


class PortPair(NamedTuple):
    """A rail between two ranks: ids of the port here and of the peer's."""

    own: str
    peers: str


@dataclass(frozen=True)
class RankLanes:
    """One rank's part of a plan, which its NIC session opens and follows.

    Attributes:
        rank: the rank in the world.
        ports: the ports to open.
        schedule: the world's schedule.
        rails: returns the rails to a peer, out of ``ports``; both ends list them in the same order.
    """

    rank: int
    ports: tuple[Nic, ...]
    schedule: NicSchedule
    rails: Callable[[int], tuple[PortPair, ...]]

    @classmethod
    def between_equals(cls, rank: int, ports: tuple[Nic, ...], schedule: NicSchedule) -> RankLanes:
        """Return the lanes if every rank has ports of these ids and reaches each of its peers from
        every one."""
        rails = tuple(PortPair(port.id, port.id) for port in ports)
        return cls(rank, ports, schedule, lambda peer: rails)

    def to(self, peer: int) -> tuple[PortPair, ...]:
        """Return the rail of each lane to a peer."""
        return self.rails(peer) * self.schedule.queue_pairs


@dataclass(frozen=True)
class NicPlan:
    """The plan that all NIC sessions of a world follow: the ports next to each rank, the routes
    between nodes, and the schedule."""

    placement: WorldPlacement
    routes: RouteTable
    schedule: NicSchedule

    def of_rank(self, rank: int, nics: Sequence[Nic]) -> RankLanes:
        """Return a rank's part. Both ends of a pair follow the route from the lower rank to the
        higher one, because a queue pair carries both directions.

        Args:
            nics: NICs of the rank's node.

        Raises:
            Unsupported: when the rails to a peer are queried, if its route uses no NIC or the way
                back takes other ports.
        """

        def rails(peer: int) -> tuple[PortPair, ...]:
            low, high = sorted((rank, peer))
            there, back = (
                self.routes.route(self.placement, *ends) for ends in ((low, high), (high, low))
            )
            pairs = [(rail.src_nic, rail.dst_nic) for rail in there.rails]
            returning = {(rail.dst_nic, rail.src_nic) for rail in back.rails}
            if {there.kind, back.kind} != {"nic"} or set(pairs) != returning:
                raise Unsupported(
                    f"the plan's route from rank {low} to {high} is {there.kind!r} by ports {pairs}, "
                    f"the one back {back.kind!r} by {sorted(returning)}; a NIC session joins two "
                    "ranks by the same ports for both directions, and relays nothing"
                )
            return tuple(PortPair(*(pair if rank == low else pair[::-1])) for pair in pairs)

        seat = self.placement[rank]
        here = (self.placement.site_of(seat.node), seat.local_rank)
        used = {
            rail.src_nic
            for one in self.routes.classes
            if not one.within and (one.src_site, one.src_local) == here
            for rail in one.rails
        }
        known = {nic.id: nic for nic in nics}
        ports = tuple(known[name] for name in seat.nics if name in used)
        return RankLanes(rank, ports, self.schedule, rails)

    def decisions(self) -> dict[str, Any]:
        """Return the decisions, by the field of the plan that states them; rates do not affect a
        session."""
        return {
            "nics": self.schedule.model_dump(),
            "placement": self.placement.model_dump(),
            "routes": {
                "classes": [
                    {
                        **one.ends._asdict(),
                        "kind": one.kind,
                        "rails": [
                            {"src_nic": rail.src_nic, "dst_nic": rail.dst_nic} for rail in one.rails
                        ],
                    }
                    for one in self.routes.classes
                ]
            },
        }
