"""Very many calls of one small op in one world: neither its time may drift, nor its memory, nor the
count of its calls.

Every result is judged, by a reference in float64 that was computed before. The time of a call is CPU
time of the process, so that others on the machine do not count; what they do to its caches makes it
longer, never shorter. So the drift is the least of the last third of the blocks of calls against the
least of the first third, and may be ``SLOWER``. What takes longer with each call makes the last third
slower as a whole. Memory, counted things and epochs have the rules of :mod:`soak.flat`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from soak.flat import ALLOWED, apart, grown, piled_up, too_much
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
            found += [f"rank {rank}: {what}" for what in too_much(each.samples, ALLOWED)]
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
    gc.freeze()  # what was imported is none of the calls': each sample would look through it all
    world = mkernel.world()
    if what.start:
        start_at(world, what.start)
    told = Told()
    judged = _Judged(world, told)
    for number in range(WARM_CALLS):
        judged.call(number, number)
    judged.tell()
    told.samples.append(_sample(what, world, 0))
    each = what.calls // BLOCKS
    for block in range(BLOCKS):
        cpu, wall = time.process_time(), time.monotonic()
        for number in range(each):
            other = what.planted == "wrong-once" and (block, number) == (BLOCKS // 2, each // 2)
            judged.call(number, number + other)
        judged.tell()
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


class _Judged:
    """Calls with fixed inputs in turn. Each is compared on the device, in the order of its stream; what
    was wrong is known after a round of them, so that calls follow each other as a user's do."""

    def __init__(self, world: World, told: Told) -> None:
        self._world, self._told = world, told
        device = world.accelerator.device
        self._given, self._truths, self._largest = [], [], []
        for turn in range(_INPUTS):
            chance = torch.Generator().manual_seed(turn)
            a, b = (
                [torch.randn(shape, generator=chance).bfloat16() for _ in range(world.size)]
                for shape in ((_M, _K), (_K, _N))
            )
            self._given.append((a[world.rank].to(device), b[world.rank].to(device)))
            truth = torch.stack([x.double() @ y.double() for x, y in zip(a, b, strict=True)]).sum(0)
            self._truths.append(truth.to(device))
            self._largest.append(float(truth.abs().max()))
        self._out = torch.empty(_M, _N, dtype=torch.bfloat16, device=device)
        self._gap = torch.empty(_M, _N, dtype=torch.float64, device=device)
        self._errors = torch.empty(_INPUTS, dtype=torch.float64, device=device)
        self._each_error = list(self._errors.unbind())
        self._open: list[tuple[int, int]] = []

    def call(self, number: int, judged_as: int) -> None:
        """One with the inputs of a number; its result is compared with the truth of another, which is
        the same unless a mistake is planted."""
        a, b = self._given[number % _INPUTS]
        fill(self._out)
        mkernel.gemm_all_reduce(a, b, out=self._out)
        torch.sub(self._out, self._truths[judged_as % _INPUTS], out=self._gap)
        torch.amax(self._gap.abs_(), (0, 1), out=self._each_error[len(self._open)])
        self._open.append((number, judged_as % _INPUTS))
        if len(self._open) == _INPUTS:
            self.tell()

    def tell(self) -> None:
        """Note which calls of this round were wrong."""
        errors = self._errors.tolist()
        for (number, judged_as), error in zip(self._open, errors, strict=False):
            right = error < _LIMIT * self._largest[judged_as]  # a NaN is not
            if not right and len(self._told.wrong) < _MOST_TOLD:
                self._told.wrong.append(
                    f"rank {self._world.rank}: call {number} is off by {error:.1e}"
                )
        self._open.clear()
