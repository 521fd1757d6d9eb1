"""The messages of one call, as a plan's ranks send them, for a few ranks that stand for all.

Ranks of equal nodes do the same at the same time, since the order of consumption is a rotation. So
one node of each kind is simulated, and a message between two of them stands for all such messages: on
the sender's links it has the bytes that one node of that kind sends, on the receiver's those that one
receives. Nodes at neighbouring distances share a message where worlds are large (``steps``); bytes
and signals stay what they are. In a world whose nodes are all of different kinds nothing is shared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from mkernel.plan.model import CommonPart
from mkernel.plan.pipeline import Exchange, Pipeline
from mkernel.topology.cost import MachineConstants
from mkernel.topology.link_queues import Message
from mkernel.topology.routes import Ends, Link, Subflow, capacities, subflows

MESSAGES = 4_000
"""The approximate limit of messages in a simulation: it weighs the cost against the detail."""


class Step(NamedTuple):
    """A run of nodes at distances ``first`` to ``first + size - 1`` in the order; 0 is the own
    node."""

    first: int
    size: int


class SimulatedRank(NamedTuple):
    """One of the simulated ranks."""

    site: int
    local: int


class OrderPlace(NamedTuple):
    """The place of a message's bytes in the order of its receiver: the node's step, the source's
    local rank counted from the own one, and the piece of ``pieces``."""

    step: int
    turn: int
    piece: int
    pieces: int


@dataclass
class CallMessages:
    """The messages of a call, between ranks that stand for all. Each rank's bytes make ``chunks``
    chunks."""

    plan: CommonPart
    pipeline: Pipeline
    constants: MachineConstants
    chunks: int
    detail: int = MESSAGES
    messages: list[Message] = field(default_factory=list)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Return the own node, then others: single ones first, then runs that grow up to a limit."""
        nodes, sites = self.plan.nodes, len(self.plan.placement.sites)
        pairs = (sites * self.plan.ranks_per_node) ** 2
        most = max(4, self.detail // pairs)  # steps that the detail allows
        longest = 1 if nodes <= most or self._explicit else -(-2 * nodes // most)
        found, at, size = [Step(0, 1)], 1, 1
        while at < nodes:
            found.append(Step(at, min(size, nodes - at)))
            at += size
            size = min(2 * size, longest)
        return tuple(found)

    @property
    def _explicit(self) -> bool:
        return len(self.plan.placement.sites) == self.plan.nodes

    @cached_property
    def links(self) -> dict[Link, int]:
        """Number the links."""
        return {link: number for number, link in enumerate(self.rates)}

    @cached_property
    def rates(self) -> dict[Link, float]:
        """Return the GB/s of every link. A rank's communication blocks are shared out evenly among
        destinations, all other nodes being one, or take all messages in turn; the blocks of a
        destination count as a link."""
        found = capacities(list(self._subflows.values()))
        rate = self._blocks_each * self.constants.comm_block_gbs
        rate = max(rate, self.constants.copy_engine_gbs or 0.0)
        turns = (*range(1, self.plan.ranks_per_node), None)
        for at in self.ranks():
            found |= {self._blocks(at, turn): rate for turn in turns}
        return found

    @property
    def _blocks_each(self) -> float:
        many = 1 if self.pipeline.blocks_in_turn else max(1, self.pipeline.destinations)
        return self.pipeline.comm_blocks / many

    @cached_property
    def _subflows(self) -> dict[Ends, tuple[Subflow, ...]]:
        table, placement = self.plan.routes, self.plan.placement
        return {one.ends: subflows(one, table, placement) for one in table.classes}

    def _blocks(self, at: SimulatedRank, turn: int | None) -> Link:
        """Name the link that stands for the blocks that send to the local rank ``turn`` before this
        one; None: to other nodes."""
        seat = self.plan.placement.sites[at.site].seats[at.local]
        if self.pipeline.blocks_in_turn:
            return Link(at.site, f"{seat.accelerator} blocks")
        where = "other nodes" if turn is None else f"the rank {turn} before"
        return Link(at.site, f"{seat.accelerator} blocks to {where}")

    def ranks(self) -> Iterator[SimulatedRank]:
        """Yield the simulated ranks."""
        for site in range(len(self.plan.placement.sites)):
            for local in range(self.plan.ranks_per_node):
                yield SimulatedRank(site, local)

    def name(self, place: OrderPlace) -> str:
        """Return the name that timelines give the message."""
        step = self.steps[place.step]
        last = f" to +{step.first + step.size - 1}" if step.size > 1 else ""
        return f"node +{step.first}{last}, local rank +{place.turn}, part {place.piece}"

    def pieces(self, step: Step) -> int:
        """Return the number of messages into which a step's bytes are cut: chunks, or as many as
        the detail allows."""
        pairs = (len(self.plan.placement.sites) * self.plan.ranks_per_node) ** 2
        return max(1, min(-(-self.chunks // step.size), self.detail // (4 * pairs)))

    def weights(self, step: Step, src: int, dst: int) -> tuple[float, float]:
        """Return how many nodes of site ``dst`` a node of ``src`` sends to in the step, and how many of
        ``src`` one of ``dst`` receives from."""
        sites, nodes = self.plan.placement.sites, self.plan.nodes
        if step.first == 0:
            return (1.0, 1.0) if src == dst else (0.0, 0.0)
        if self._explicit:
            here, there = (sites[site].nodes[0][0] for site in (src, dst))
            meet = float(step.first <= (here - there) % nodes < step.first + step.size)
            return meet, meet
        share = step.size / (nodes - 1)
        same = src == dst
        return share * (sites[dst].count - same), share * (sites[src].count - same)

    def turns(self) -> Iterator[tuple[int, Step, int]]:
        """Yield the places of others' bytes in the order of consumption: number and step of nodes,
        and the local rank counted from the own one."""
        every = self.pipeline.order.steps(len(self.steps))
        return ((number, self.steps[number], turn) for number, turn in every if number or turn)

    def exchanges(
        self, way: int
    ) -> Iterator[tuple[OrderPlace, SimulatedRank, SimulatedRank, tuple[float, float]]]:
        """Yield every message that direct exchange takes, in the order in which ranks send: its
        place, both ends, and its weights. ``way``: -1 to the ranks that consume a rank's rows, 1 to
        those whose rows it consumes."""
        each = self.plan.ranks_per_node
        for number, step, turn in self.turns():
            pieces = self.pieces(step)
            for piece in range(pieces):
                for src in self.ranks():
                    for site in range(len(self.plan.placement.sites)):
                        weight = self.weights(step, src.site, site)
                        if any(weight):
                            dst = SimulatedRank(site, (src.local + way * turn) % each)
                            yield OrderPlace(number, turn, piece, pieces), src, dst, weight

    def send(
        self,
        src: SimulatedRank,
        dst: SimulatedRank,
        payload: float,
        weight: tuple[float, float],
        place: OrderPlace,
        ready_us: float = 0.0,
        *,
        within: bool = False,
    ) -> Message:
        """Add a message and return it: on either side it has the piece's part of ``weight`` times
        ``payload`` bytes, and its chunks' signals. ``within`` keeps it inside the node, whatever
        the step."""
        within = within or place.step == 0
        ends = Ends(src.site, src.local, dst.site, dst.local, within)
        payload /= place.pieces
        turn = (src.local - dst.local) % self.plan.ranks_per_node
        blocks = self._blocks(src, turn if within else None)
        signals = self.chunks / place.pieces * weight[0] / self._blocks_each
        if self.pipeline.grouped:  # its share of the one that all of a rank's messages have
            signals /= self.plan.world_size - 1
        start_us = payload * weight[0] / (self.rates[blocks] * 1e3)
        start_us += signals * self.constants.signal_us
        times: list[list[tuple[int, float]]] = []
        for subflow in self._subflows[ends]:
            times.append([(self.links[blocks], start_us * subflow.share)])
            for hop, (link, _) in enumerate(subflow.links):
                size = payload * subflow.share * weight[hop >= subflow.src_links]
                times[-1].append((self.links[link], size / (self.rates[link] * 1e3)))
        latency_us = self.plan.routes.by_ends[ends].latency_us
        message = Message(self.name(place), times, latency_us, ready_us)
        self.messages.append(message)
        return message

    def join(self, messages: Iterable[Message], ready_us: float) -> Message:
        """Add a moment at which all of these messages have arrived, not before ``ready_us``, and
        return it."""
        moment = Message("all are there", (), 0.0, ready_us)
        for message in messages:
            moment.after(message)
        self.messages.append(moment)
        return moment


Arrivals = dict[tuple[SimulatedRank, OrderPlace], list[Message]]
"""The messages that must have arrived before a receiver (key) takes that place of its order."""


def gather(
    made: CallMessages,
    payload: float,
    exchange: Exchange,
    after: Mapping[SimulatedRank, Sequence[Message]],
    across: float | None = None,
) -> Arrivals:
    """Make every rank send the same ``payload`` bytes to all others, in the order in which they
    consume. ``across``: what it sends to another node for all ranks there, if the exchange is
    hierarchical; None: as many.

    ``after`` maps a rank to the parts of its bytes in order: each part is there when that message
    has arrived. Without an entry all bytes are there from the start. If the exchange is
    hierarchical, the receiver forwards them to its neighbours.
    """
    arrivals: Arrivals = defaultdict(list)
    for place, src, dst, weight in made.exchanges(-1):
        within = place.step == 0
        if exchange == "hierarchical" and not within and place.turn:
            continue  # comes from the neighbour that this step's turn 0 goes to
        nbytes = payload
        if exchange == "hierarchical" and not within and across is not None:
            nbytes = across
        message = made.send(src, dst, nbytes, weight, place)
        if src in after:
            parts = after[src]
            message.after(parts[-(-(place.piece + 1) * len(parts) // place.pieces) - 1])
        arrivals[dst, place].append(message)
        if exchange == "direct" or within:
            continue
        for turn in range(1, made.plan.ranks_per_node):
            peer = SimulatedRank(dst.site, (dst.local - turn) % made.plan.ranks_per_node)
            onward = made.send(dst, peer, payload, (weight[1],) * 2, place, within=True)
            onward.after(message)
            arrivals[peer, place._replace(turn=turn)].append(onward)
    return arrivals


def scatter(
    made: CallMessages, payload: float, exchange: Exchange, done_us: Mapping[OrderPlace, float]
) -> Arrivals:
    """Make every rank send each other ``payload`` bytes of partial results, when they are computed.

    If the exchange is hierarchical, they go to the neighbour of the owner's local rank, which adds
    up all those of its node.
    """
    arrivals: Arrivals = defaultdict(list)
    sums: dict[tuple[SimulatedRank, int, int, int], Message] = {}
    for place, src, dst, weight in made.exchanges(1):
        ready_us = done_us[place]
        if exchange == "hierarchical" and place.step and place.turn:
            adder = SimulatedRank(src.site, dst.local)
            message = made.send(src, adder, payload, (weight[0],) * 2, place, ready_us, within=True)
            sums[adder, dst.site, place.step, place.piece].after(message)
            continue
        message = made.send(src, dst, payload, weight, place, ready_us)
        if place.step and not place.turn:
            sums[src, dst.site, place.step, place.piece] = message
        arrivals[dst, place].append(message)
    return arrivals
