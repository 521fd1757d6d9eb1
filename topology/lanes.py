"""How puts to ranks of other nodes are laid on ports and queue pairs: what NIC sessions follow.

The routes say which ports two ranks use, rail by rail; :class:`NicSchedule` says the rest, for all
pairs of a world alike. A session opens exactly this and chooses nothing.
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
    """What a NIC backend makes of the settings, before ports are known."""

    rails: int = Field(8, ge=1, description="ports that a rank uses, at most")
    queue_pairs: int = Field(1, ge=1, description="of two ranks on each of their rails")
    stripe_bytes: int = Field(1 << 18, ge=1, description="see NicSchedule")


ANY_NIC = NicUse()
"""Of no backend in particular."""


class NicSchedule(Model):
    """How a put travels between two ranks, the same for every pair.

    They are joined by ``queue_pairs`` on each rail of their route. Each queue pair is a *lane*: lane i
    lies on rail i modulo the number of rails. A put of ``stripe_bytes`` or more is cut into one piece
    for every lane, of equal sizes. A smaller one takes one lane whole: the next one *in turn* among the
    puts of this rank to that peer, in the order in which its proxy takes them.

    Turns are better than a lane that follows from a put's place: of few equal chunks, which is what
    plans are made of, no lane gets two more than another, whoever produced them, and strides of a plan
    cannot put all on one lane. Nobody sees the difference: between lanes there is no order, and a put's
    signal alone says that its bytes are there.
    """

    queue_pairs: int = Field(ge=1)
    stripe_bytes: int | None = Field(
        ge=1, description="None: no two ranks have several lanes, so nothing is cut"
    )
    small_puts: Literal["in turn"] = "in turn"


def nic_schedule(use: NicUse, *, several_rails: bool) -> NicSchedule:
    """The schedule of a world. ``several_rails``: some of its ranks are joined by more than one."""
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
    """One rank's part of a plan: what its NIC session opens and does.

    Attributes:
        rank: in the world.
        ports: to open.
        schedule: the world's.
        rails: those to a peer, of ``ports``; both ends list them in the same order.
    """

    rank: int
    ports: tuple[Nic, ...]
    schedule: NicSchedule
    rails: Callable[[int], tuple[PortPair, ...]]

    @classmethod
    def between_equals(cls, rank: int, ports: tuple[Nic, ...], schedule: NicSchedule) -> RankLanes:
        """Where every rank has ports of these ids and reaches each of its peers from every one."""
        rails = tuple(PortPair(port.id, port.id) for port in ports)
        return cls(rank, ports, schedule, lambda peer: rails)

    def to(self, peer: int) -> tuple[PortPair, ...]:
        """The rail of each lane to a peer."""
        return self.rails(peer) * self.schedule.queue_pairs


@dataclass(frozen=True)
class NicPlan:
    """All that the NIC sessions of a world follow: who sits next to which ports, the routes between
    nodes, and the schedule."""

    placement: WorldPlacement
    routes: RouteTable
    schedule: NicSchedule

    def of_rank(self, rank: int, nics: Sequence[Nic]) -> RankLanes:
        """A rank's part. Both ends of a pair follow the route from the lower rank to the higher one: a
        queue pair carries both directions.

        Args:
            nics: of the rank's node.

        Raises:
            Unsupported: once the rails to a peer are asked for, where its route is no NIC's or the way
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
        """What is decided, by the field of the plan that says it; rates leave no trace in a session."""
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
