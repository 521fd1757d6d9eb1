"""Very many calls of one small op in one world: neither its time may drift, nor its memory, nor the
count of its calls.

Every result is judged, by a reference in float64 that was computed before. Calls come in rounds, whose
results are compared on the device when all of a round are queued, so that calls follow each other as a
user's do. Where a graph is replayed, it holds a round.

On CPUs the time of a call is CPU time of the process, so that others on the machine do not count; what
they do to its caches makes it longer, never shorter. So the drift is the least of the last third of the
blocks of calls against the least of the first third. On GPUs, which nobody else uses meanwhile, it is
time on the clock, and tenths are compared. It may be ``SLOWER``. Memory, counted things and epochs have
the rules of :mod:`campaigns.flat`; replays are not counted by the host.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from campaigns.flat import ALLOWED, apart, grown, piled_up, too_much
from campaigns.sample import Sample, take
from campaigns.start import start_at

import mkernel
from mkernel.cases.poison import fill
from mkernel.world.world import World

SLOWER = 1.25
BLOCKS = 30
WARM_CALLS = 40
"""Calls before the first sample."""
_ROUND = 16
_M, _N, _K = 4, 8, 16
_LIMIT = 1 / 64
"""Relative to the largest element: two roundings to bfloat16."""
_MOST_TOLD = 10
TIMEOUT_S = 60.0

PlantedDrift = Literal["wrong-once"]


class Many(NamedTuple):
    """So many calls on each rank. ``start``: how many the world is to have made before, as if.
    ``graph``: they are replayed, in whole rounds. Blocks are
    of equally many, at least ``calls`` in all."""

    accelerator: str
    ranks: int
    calls: int
    start: int = 0
    planted: PlantedDrift | None = None
    graph: bool = False

    @property
    def each(self) -> int:
        """Return the number of calls of a block."""
        each = -(-self.calls // BLOCKS)
        return -(-each // _ROUND) * _ROUND if self.graph else each

    @property
    def counted(self) -> int:
        """Return how many calls the host has started when all are over: a graph's at its capture
        only."""
        return self.start + WARM_CALLS + (_ROUND if self.graph else self.each * BLOCKS)


@dataclass
class RankOutcome:
    """The findings of one rank: a sample and the seconds of a call, block after block."""

    samples: list[Sample] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    on_gpu: bool = False

    @property
    def drift(self) -> float:
        """Return how many times as long a call takes at the end."""
        return drift(self.wall_s, 10) if self.on_gpu else drift(self.cpu_s, 3)


@dataclass
class Found:
    """The findings of all ranks."""

    what: Many
    told: Sequence[RankOutcome]

    @property
    def wrong(self) -> list[str]:
        """Return what is wrong, in sentences."""
        found = []
        for rank, each in enumerate(self.told):
            found += each.wrong
            found += [f"rank {rank}: {what}" for what in piled_up(each.samples)]
            found += [f"rank {rank}: {what}" for what in too_much(each.samples, ALLOWED)]
            if each.drift > SLOWER:
                found.append(f"rank {rank}: calls take {each.drift:.2f} times as long at the end")
        found += apart({rank: each.samples for rank, each in enumerate(self.told)})
        reached = {each.samples[-1].worlds["all"].number for each in self.told}
        if reached != {self.what.counted}:
            found.append(f"the world's calls end at {sorted(reached)}, not at {self.what.counted}")
        return found

    def summary(self) -> dict[str, Any]:
        """Return a JSON-safe summary."""
        return {
            "accelerator": self.what.accelerator,
            "ranks": self.what.ranks,
            "mode": "graph" if self.what.graph else "eager",
            "calls": self.what.each * BLOCKS,
            "begun_at_call": self.what.start,
            "seconds": round(sum(self.told[0].wall_s) * self.what.each),
            "us_a_call": [round(1e6 * min(each.wall_s), 1) for each in self.told],
            "cpu_us_a_call": [round(1e6 * min(each.cpu_s), 1) for each in self.told],
            "end_to_begin": [round(each.drift, 3) for each in self.told],
            "most_grown_bytes": [grown(each.samples) for each in self.told],
            "wrong": self.wrong,
        }


def many(what: Many) -> Found:
    """Have ranks of a world of one host make the calls."""
    told = mkernel.launch(
        _calls, what, ranks_per_node=what.ranks, accelerator=what.accelerator, timeout_s=TIMEOUT_S
    )
    return Found(what, told)


def drift(seconds: Sequence[float], parts: int) -> float:
    """Return the least of the last part as a multiple of the least of the first one."""
    part = len(seconds) // parts
    return min(seconds[-part:]) / min(seconds[:part])


def _calls(what: Many) -> RankOutcome:
    gc.freeze()  # what was imported is none of the calls': each sample would look through it all
    world = mkernel.world()
    if what.start:
        start_at(world, what.start)
    told = RankOutcome(on_gpu=torch.device(world.accelerator.device).type == "cuda")
    rounds = _Rounds(world, told)
    rounds.make(WARM_CALLS)
    if what.graph:
        rounds.capture()
        rounds.make(_ROUND)
    told.samples.append(_sample(what, world, 0))
    for block in range(BLOCKS):
        cpu, wall = time.process_time(), time.monotonic()
        rounds.make(what.each, what.planted if block == BLOCKS // 2 else None)
        world.synchronize()
        told.cpu_s.append((time.process_time() - cpu) / what.each)
        told.wall_s.append((time.monotonic() - wall) / what.each)
        told.samples.append(_sample(what, world, (block + 1) * what.each, told.samples[0]))
    return told


def _sample(what: Many, world: World, calls: int, first: Sample | None = None) -> Sample:
    world.synchronize()
    sample = take(calls, {"all": world}, None if first is None else first.held)
    made = sample.worlds["all"]
    return sample._replace(worlds={"all": made._replace(counted=made.counted + what.start)})


class _Rounds:
    """Calls with fixed inputs in turn, each into an output of its own."""

    def __init__(self, world: World, told: RankOutcome) -> None:
        self._world, self._told, self._made = world, told, 0
        device = world.accelerator.device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given, truths = [], []
        for turn in range(_ROUND):
            chance = torch.Generator().manual_seed(turn)
            a, b = (
                [torch.randn(shape, generator=chance).bfloat16() for _ in range(world.size)]
                for shape in ((_M, _K), (_K, _N))
            )
            self._given.append((a[world.rank].to(device), b[world.rank].to(device)))
            truths.append(
                torch.stack([x.double() @ y.double() for x, y in zip(a, b, strict=True)]).sum(0)
            )
        self._largest = [float(truth.abs().max()) for truth in truths]
        self._truths = torch.stack(truths).to(device)
        self._outs = torch.empty(_ROUND, _M, _N, dtype=torch.bfloat16, device=device)
        self._each_out = list(self._outs.unbind())

    def capture(self) -> None:
        """Capture a round in a graph, which is replayed from now on."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self._call(_ROUND)
        self._graph = graph

    def make(self, calls: int, planted: PlantedDrift | None = None) -> None:
        """Make so many calls, and note which were wrong. ``planted``: a mistake in the first round of
        them."""
        for first in range(0, calls, _ROUND):
            these = min(_ROUND, calls - first)
            fill(self._outs)
            if self._graph is not None and these == _ROUND:
                self._graph.replay()
            else:
                self._call(these)
            if planted == "wrong-once" and first == 0:
                self._outs[these // 2] += 1
            self._judge(these)

    def _call(self, calls: int) -> None:
        for (a, b), out in zip(self._given[:calls], self._each_out, strict=False):
            mkernel.gemm_all_reduce(a, b, out=out)

    def _judge(self, calls: int) -> None:
        errors = (self._outs[:calls] - self._truths[:calls]).abs_().amax((1, 2)).tolist()
        for number, error in enumerate(errors):
            right = error < _LIMIT * self._largest[number]  # a NaN is not
            if not right and len(self._told.wrong) < _MOST_TOLD:
                self._told.wrong.append(
                    f"rank {self._world.rank}: call {self._made + number} is off by {error:.1e}"
                )
        self._made += calls
