"""A simulation of a plan's messages and tiles, which predicts what its call takes. Nothing is
measured.

Messages queue for links (:mod:`mkernel.topology.link_queues`), tiles come in whole waves
(:mod:`.waves`) and chunks cost signals; so contention, order and the size of chunks show, which the
closed forms leave out. The rates are those of the closed forms: where nothing contends, both agree.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pydantic import Field

from mkernel.errors import Unsupported
from mkernel.plan.messages import (
    MESSAGES,
    Arrivals,
    CallMessages,
    OrderPlace,
    SimulatedRank,
    gather,
    scatter,
)
from mkernel.plan.model import CommonPart, GemmShape, rows_of_a_rank
from mkernel.plan.pipeline import Exchange, Pipeline
from mkernel.plan.predict import PairBytes, sent_by, way_of
from mkernel.plan.traffic import traffic
from mkernel.topology.cost import MachineConstants
from mkernel.topology.link_queues import Busy, Message, run
from mkernel.topology.model import Model

_PARTS = 8
"""Parts of an owner's sums that AllReduce sends on as soon as they are complete."""
_PLAIN_TILE = (128, 256)
_TILES_A_CORE = 16
"""The tiles that ops other than GEMMs are taken to have: their work is cut finely and evenly."""


class LinkUse(Model):
    """The use of a link on each node of a site, in one call."""

    nodes: int = Field(ge=1, description="nodes that have this link, all as busy")
    site: int = Field(ge=0)
    name: str
    gbs: float = Field(gt=0)
    busy_us: float = Field(ge=0)
    utilization: float = Field(ge=0, le=1, description="of the call's time")


class Simulation(Model):
    """A simulated call, in microseconds.

    ``floor_us``: no schedule can be faster: the launch, and the longer of the compute and the busiest
    link. ``exposed_us``: communication that compute does not hide.
    """

    exchange: Exchange
    time_us: float = Field(ge=0)
    compute_us: float = Field(ge=0)
    communication_us: float = Field(ge=0, description="until the last byte has arrived")
    exposed_us: float = Field(ge=0)
    floor_us: float = Field(ge=0)
    constants: str
    simulated_ranks: int = Field(ge=1, description="that stand for all of the world's")
    messages: int = Field(ge=0)
    links: tuple[LinkUse, ...] = Field(description="busiest first")


class Traced(NamedTuple):
    """A simulation and its timeline: the busy spans of each link, and each simulated rank's steps
    as (name, start, end)."""

    result: Simulation
    call: CallMessages
    busy: list[list[Busy]]
    computed: Mapping[SimulatedRank, list[tuple[str, float, float]]]


def simulate(
    plan: CommonPart,
    pipeline: Pipeline,
    constants: MachineConstants,
    *,
    detail: int = MESSAGES,
) -> Simulation:
    """Simulate the call of a plan with such a pipeline, in about ``detail`` messages."""
    return trace(plan, pipeline, constants, detail=detail, keep=False).result


def trace(
    plan: CommonPart,
    pipeline: Pipeline,
    constants: MachineConstants,
    *,
    detail: int = MESSAGES,
    keep: bool = True,
) -> Traced:
    """Simulate like :func:`simulate`, and keep the timeline if ``keep``."""
    exchange = pipeline.exchange
    made = CallMessages(plan, pipeline, constants, _chunks(plan, pipeline), detail)
    sent = sent_by(plan, pipeline)
    device = _Device(plan, pipeline, made.chunks)
    after: dict[SimulatedRank, Sequence[Message]] = {}
    arrivals: Arrivals = {}
    done_us: dict[OrderPlace, float] = {}
    if sent.scatter:
        done_us = device.without_waiting(made)
        library = plan.path == "library"
        arrivals = scatter(
            made, sent.scatter, exchange,
            dict.fromkeys(done_us, device.total_us) if library else done_us,
        )  # fmt: skip
        if sent.spread:
            after = {at: _sums(made, at, arrivals, device.busy_us) for at in made.ranks()}
            gather(made, sent.spread, exchange, after)
    elif sent.gather:
        rail = PairBytes.expected(traffic(plan, way_of(pipeline))).rail
        arrivals = gather(made, sent.gather, exchange, after, rail)
    spans: list[list[Busy]] = [[] for _ in made.links]
    busy = run(made.messages, len(made.links), spans if keep else None)
    comm_us = max((message.arrived_us for message in made.messages), default=0.0)
    computed = {at: device.steps(made, at, arrivals, done_us, comm_us) for at in made.ranks()}
    end_us = max(comm_us, *(own[-1][2] for own in computed.values()))
    result = Simulation(
        exchange=exchange,
        time_us=constants.launch_us + end_us,
        compute_us=device.total_us,
        communication_us=comm_us,
        exposed_us=max(0.0, end_us - device.total_us),
        floor_us=constants.launch_us + max(device.total_us, *_floors(made.messages, busy)),
        constants=constants.name,
        simulated_ranks=len(computed),
        messages=len(made.messages),
        links=_uses(made, busy, end_us),
    )
    return Traced(result, made, spans, computed)


def _floors(messages: Sequence[Message], busy: Sequence[float]) -> list[float]:
    """Return the time of each busy link plus the least latency behind it; [0.0] if none is busy."""
    latency = [float("inf")] * len(busy)
    for message in messages:
        for subflow in message.subflows:
            for link, _ in subflow:
                latency[link] = min(latency[link], message.latency_us)
    return [time + least for time, least in zip(busy, latency, strict=True) if time] or [0.0]


def _uses(made: CallMessages, busy: Sequence[float], end_us: float) -> tuple[LinkUse, ...]:
    sites = made.plan.placement.sites
    uses = [
        LinkUse(
            nodes=sites[link.site].count,
            site=link.site,
            name=link.name,
            gbs=made.rates[link],
            busy_us=busy[number],
            utilization=min(1.0, busy[number] / end_us) if end_us else 0.0,
        )
        for link, number in made.links.items()
    ]
    return tuple(sorted(uses, key=lambda use: (-use.utilization, use.site, use.name)))


def _sums(
    made: CallMessages, at: SimulatedRank, arrivals: Arrivals, computed_us: float
) -> list[Message]:
    """Add the moments at which parts of a rank's sums are complete, and return them; its own terms
    are computed last."""
    parts: list[list[Message]] = [[] for _ in range(_PARTS)]
    for (dst, place), messages in arrivals.items():
        if dst == at:
            parts[-(-(place.piece + 1) * _PARTS // place.pieces) - 1] += messages
    return [made.join(messages, computed_us) for messages in parts]


def _chunks(plan: CommonPart, pipeline: Pipeline) -> int:
    """Return the number of chunks into which one rank's bytes for another are cut."""
    if pipeline.chunking is not None:
        return pipeline.chunking.chunks_per_rank
    if pipeline.rows_per_chunk is None:
        return 1
    return max(1, -(-rows_of_a_rank(plan.shape, plan.world_size) // pipeline.rows_per_chunk))


class _Device:
    """The compute of one rank: equal tiles that take the predicted time together, and their order.

    One kernel takes tile by tile; or, if the ``chunks`` of each other rank's rows are kernels of
    their own, a kernel starts after the one before it and ends with its last wave.
    """

    def __init__(self, plan: CommonPart, pipeline: Pipeline, chunks: int) -> None:
        if plan.prediction is None:
            raise Unsupported(
                "nothing to simulate: no constants of these chips are known; --constants gives some"
            )
        self.total_us = plan.prediction.compute_us
        self.cores = pipeline.compute_blocks
        shape, cut = plan.shape, pipeline.chunking
        if isinstance(shape, GemmShape):
            rows, columns = (cut.tile_m, cut.tile_n) if cut else _PLAIN_TILE
            self._grid: tuple[float, int] = shape.m / rows, -(-shape.n // columns)
        else:
            self._grid = self.cores * _TILES_A_CORE, 1
        self.tiles = math.ceil(self._grid[0]) * self._grid[1]
        self.tile_us = self.total_us / -(-self.tiles // self.cores)
        self.overlaps = plan.path == "fused"
        self.busy_us = self.total_us  # more where kernels of few tiles leave cores idle
        self._world = plan.world_size
        self._chunks = chunks if pipeline.one_kernel_per_chunk else None

    def _ends(self, steps: Sequence[tuple[float, float]], own: int) -> list[float]:
        """Return when each step ends. ``own`` is the index of the rank's own rows, which are never
        cut."""
        if self._chunks is None:
            return list(ends_us(steps, tiles=self.tiles, tile_us=self.tile_us, cores=self.cores))
        ends, end_us = [], 0.0
        for number, (share, there_us) in enumerate(steps):
            kernels = 1 if number == own else max(1, round(share * self._world * self._chunks))
            end_us = max(end_us, there_us) + kernels * self._kernel_us(share / kernels)
            ends.append(end_us)
        return ends

    def _kernel_us(self, share: float) -> float:
        """Return the time of a kernel that computes this share of all tiles."""
        tiles = math.ceil(share * self._grid[0] - 1e-9) * self._grid[1]
        return -(-tiles // self.cores) * self.tile_us

    def _places(self, made: CallMessages) -> list[tuple[OrderPlace, float]]:
        """List the pieces of other ranks in order, each with its share of a rank's work."""
        return [
            (OrderPlace(number, turn, piece, pieces), step.size / self._world / pieces)
            for number, step, turn in made.turns()
            for pieces in (made.pieces(step),)
            for piece in range(pieces)
        ]

    def without_waiting(self, made: CallMessages) -> dict[OrderPlace, float]:
        """Return when each piece for other ranks is computed, if nothing waits; the own one comes
        last."""
        places = self._places(made)
        steps = [*((share, 0.0) for _, share in places), (1 / self._world, 0.0)]
        ends = self._ends(steps, own=len(places))
        self.busy_us = ends[-1]
        return {place: end for (place, _), end in zip(places, ends, strict=False)}

    def steps(
        self,
        made: CallMessages,
        at: SimulatedRank,
        arrivals: Arrivals,
        done_us: Mapping[OrderPlace, float],
        comm_us: float,
    ) -> list[tuple[str, float, float]]:
        """Return the (name, start, end) of each step that a rank computes, in order."""
        places = self._places(made)
        names = [made.name(place) for place, _ in places]
        if done_us:
            ends = [*done_us.values(), self.busy_us]
            names.append("own")
        else:
            there = [
                max((one.arrived_us for one in arrivals.get((at, place), ())), default=0.0)
                if self.overlaps
                else comm_us
                for place, _ in places
            ]
            own = 0.0 if self.overlaps else comm_us
            shares = [(share, ready) for (_, share), ready in zip(places, there, strict=True)]
            ends = self._ends([(1 / self._world, own), *shares], own=0)
            names.insert(0, "own")
        starts = [0.0, *ends[:-1]]
        return list(zip(names, starts, ends, strict=True))


def ends_us(
    steps: Iterable[tuple[float, float]], *, tiles: int, tile_us: float, cores: int
) -> Iterator[float]:
    """Yield the time at which each step's tiles are done. A persistent kernel computes them: tile t
    runs on core t mod ``cores``, after that core's previous tile.

    Args:
        steps: (share of all tiles, microsecond from which on its data is there), in order; the
            shares add up to 1. A tile that two steps share belongs to the later one.
        tiles, tile_us: tiles of the device in all, and the time of one.
    """
    free: deque[tuple[float, int]] = deque([(0.0, cores)])  # cores in turn, and from when on
    share = ready_us = end_us = 0.0
    given = 0
    for part, there_us in steps:
        share += part
        ready_us = max(ready_us, there_us)
        upto = tiles if share > 1 - 1e-9 else int(share * tiles + 1e-9)
        left, given = upto - given, upto
        while left:
            from_us, count = free.popleft()
            took = min(count, left)
            left -= took
            if took < count:
                free.appendleft((from_us, count - took))
            done_us = max(from_us, ready_us) + tile_us
            end_us = max(end_us, done_us)
            if free and free[-1][0] == done_us:
                took += free.pop()[1]
            free.append((done_us, took))
        yield end_us
