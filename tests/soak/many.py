"""Very many calls of one small op in one world: neither its time may drift, nor its memory, nor the
count of its calls.

Every result is judged, by a reference in float64 that was computed before. The time of a call is CPU
time of the process, so that others on the machine do not count; what they do to its caches makes it
longer, never shorter. So the drift is the least of the last third of the blocks of calls against the
least of the first third, and may be ``SLOWER``. What takes longer with each call makes the last third
slower as a whole. Memory, counted things and epochs have the rules of :mod:`soak.flat`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from soak.flat import apart, grown, piled_up, too_much
from soak.sample import Sample, take
from soak.start import start_at

import mkernel
from mkernel.cases.poison import fill
from mkernel.world.world import World

SLOWER = 1.25
BLOCKS = 30
WARM_CALLS = 40
"""Calls before the first sample."""
_INPUTS = 16
_M, _N, _K = 4, 8, 16
_LIMIT = 1 / 64
"""Relative to the largest element: two roundings to bfloat16."""
_MOST_TOLD = 10
TIMEOUT_S = 60.0

PlantedDrift = Literal["wrong-once"]


class Many(NamedTuple):
    """So many calls on each rank. ``start``: how many the world is to have made before, as if."""

    accelerator: str
    ranks: int
    calls: int
    start: int = 0
    planted: PlantedDrift | None = None


@dataclass
class Told:
    """What one rank found: a sample and the CPU seconds of a call, block after block."""

    samples: list[Sample] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Found:
    """What all ranks found."""

    what: Many
    told: Sequence[Told]

    @property
    def wrong(self) -> list[str]:
        """In sentences."""
        found = []
        for rank, each in enumerate(self.told):
            found += each.wrong
            found += [f"rank {rank}: {what}" for what in piled_up(each.samples)]
            found += [f"rank {rank}: {what}" for what in too_much(each.samples)]
            slower = drift(each.cpu_s)
            if slower > SLOWER:
                found.append(f"rank {rank}: calls take {slower:.2f} times as long at the end")
        found += apart({rank: each.samples for rank, each in enumerate(self.told)})
        reached = {each.samples[-1].worlds["all"].number for each in self.told}
        wanted = self.what.start + WARM_CALLS + self.what.calls // BLOCKS * BLOCKS
        if reached != {wanted}:
            found.append(f"the world's calls end at {sorted(reached)}, not at {wanted}")
        return found

    def summary(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "accelerator": self.what.accelerator,
            "ranks": self.what.ranks,
            "calls": self.what.calls,
            "begun_at_call": self.what.start,
            "seconds": round(sum(self.told[0].wall_s) * (self.what.calls // BLOCKS)),
            "cpu_us_a_call": [round(1e6 * min(each.cpu_s), 1) for each in self.told],
            "last_third_to_first": [round(drift(each.cpu_s), 3) for each in self.told],
            "most_grown_bytes": [grown(each.samples) for each in self.told],
            "wrong": self.wrong,
        }


def many(what: Many) -> Found:
    """Have ranks of a world of one host make the calls."""
    told = mkernel.launch(
        _calls, what, ranks_per_node=what.ranks, accelerator=what.accelerator, timeout_s=TIMEOUT_S
    )
    return Found(what, told)


def drift(seconds: Sequence[float]) -> float:
    """The least of the last third as a multiple of the least of the first third."""
    third = len(seconds) // 3
    return min(seconds[-third:]) / min(seconds[:third])


def _calls(what: Many) -> Told:
    world = mkernel.world()
    if what.start:
        start_at(world, what.start)
    told = Told()
    call = _judged(world, told)
    for number in range(WARM_CALLS):
        call(number, number)
    told.samples.append(_sample(what, world, 0))
    each = what.calls // BLOCKS
    for block in range(BLOCKS):
        cpu, wall = time.process_time(), time.monotonic()
        for number in range(each):
            other = what.planted == "wrong-once" and (block, number) == (BLOCKS // 2, each // 2)
            call(number, number + other)
        world.synchronize()
        told.cpu_s.append((time.process_time() - cpu) / each)
        told.wall_s.append((time.monotonic() - wall) / each)
        told.samples.append(_sample(what, world, (block + 1) * each, told.samples[0]))
    return told


def _sample(what: Many, world: World, calls: int, first: Sample | None = None) -> Sample:
    world.synchronize()
    sample = take(calls, {"all": world}, None if first is None else first.held)
    made = sample.worlds["all"]
    return sample._replace(worlds={"all": made._replace(counted=made.counted + what.start)})


def _judged(world: World, told: Told) -> Callable[[int, int], None]:
    """One call with the inputs of a number; its result is compared with the truth of another, which
    is the same unless a mistake is planted."""
    device = world.accelerator.device
    given, truths = [], []
    for turn in range(_INPUTS):
        chance = torch.Generator().manual_seed(turn)
        a, b = (
            [torch.randn(shape, generator=chance).bfloat16() for _ in range(world.size)]
            for shape in ((_M, _K), (_K, _N))
        )
        given.append((a[world.rank].to(device), b[world.rank].to(device)))
        truth = torch.stack([x.double() @ y.double() for x, y in zip(a, b, strict=True)]).sum(0)
        truths.append(truth.to(device))
    out = torch.empty(_M, _N, dtype=torch.bfloat16, device=device)

    def call(number: int, judged_as: int) -> None:
        a, b = given[number % _INPUTS]
        truth = truths[judged_as % _INPUTS]
        fill(out)
        mkernel.gemm_all_reduce(a, b, out=out)
        error = float((out - truth).abs().max())
        if not error < _LIMIT * float(truth.abs().max()) and len(told.wrong) < _MOST_TOLD:
            told.wrong.append(f"rank {world.rank}: call {number} is off by {error:.1e}")

    return call
