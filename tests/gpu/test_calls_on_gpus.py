"""Every family of calls on GPUs through the public API: right in float64, the same bits, with ranks
late by turns, in a queue, in graphs and on two streams, between calls of other kernels; on one node and
on several."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calls
import norm_ranks
import pytest
from device_buffers import needs_gpus, takes_ranks
from families import FAMILIES, Family

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]


World = tuple[int, int]
"""Nodes, and ranks of each."""


def drawn(family: Family, world: World) -> None:
    """Random shapes, behind those of graphs."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    in_graphs = family.shapes if family.in_graphs is None else family.in_graphs
    shapes = [*(in_graphs if family.judged is None else family.judged)]
    if family.drawn is not None:
        shapes += [family.drawn(chance, math.prod(world)) for _ in range(family.draws)]
    family.right(world, calls.judged, shapes, seed)


def late(family: Family, world: World) -> None:
    """Ranks that are late by turns, and memory that is used again."""
    family.right(world, calls.skewed, family.shapes, family.rounds, 2)


def queued(family: Family, world: World) -> None:
    """Many calls that the host does not wait for."""
    family.right(world, calls.queued, family.shapes, family.queued, 3)


def replayed(family: Family, world: World) -> None:
    """Graphs, with calls between their replays."""
    family.right(world, calls.replayed, family.in_graphs or family.shapes, family.replays)


def two_streams(family: Family, world: World) -> None:
    """Calls on two streams at once."""
    family.right(world, calls.two_streams, family.shapes, family.streams)


def repeated(family: Family, world: World) -> None:
    """The same bits, on all ranks where an op promises it; the checksum sees a difference."""
    shapes: Any = family.repeated or family.shapes
    found = family.run(world, calls.same_bits, shapes, family.times)
    assert [text for failures, _ in found for text in failures] == []
    for shape, sums in zip(shapes, zip(*(sums for _, sums in found), strict=True), strict=True):
        alike = getattr(shape, "op", "") in ("gemm_all_reduce", "all_reduce")
        assert len(set(sums)) == (1 if alike else math.prod(world)), shape


SCENARIOS = {each.__name__: each for each in (drawn, late, queued, replayed, two_streams, repeated)}


def tried(family: Family, scenario: str, world: World) -> bool:
    """Return whether a scenario is for a family's calls in a world of so many ranks."""
    times = {
        "drawn": family.draws
        if family.drawn or family.around or family.nic or family.judged
        else 0,
        "late": family.rounds,
        "queued": family.queued,
        "replayed": family.replays,
        "two_streams": family.streams,
        "repeated": family.times,
    }
    least = family.least if scenario in ("drawn", "replayed") else 2
    here = family.nic is None or scenario == "drawn" or world == family.worlds[0]
    return here and math.prod(world) >= least and times[scenario] > 0


def every() -> Iterator[Any]:
    """All of them, those beside each other that may have the same processes."""
    for name, family in FAMILIES.items():
        for world in family.worlds:
            for scenario in SCENARIOS:
                if tried(family, scenario, world):
                    size = math.prod(world)
                    marks = [*family.marks, *([takes_ranks(size)] if size > 1 else [])]
                    among = f"{world[0]}x{world[1]}" if family.nic else size
                    yield pytest.param(
                        family, scenario, world, id=f"{name}-{scenario}-{among}", marks=marks
                    )


@pytest.fixture(scope="module")
def constants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few rows are left to their kernel wherever it takes them."""
    return norm_ranks.everywhere(tmp_path_factory.mktemp("few_rows") / "constants.json")


@pytest.mark.parametrize(("family", "scenario", "world"), [*every()])
def test_calls(
    family: Family,
    scenario: str,
    world: World,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in family.environment.items():
        monkeypatch.setenv(name, value)
    if family.everywhere:
        monkeypatch.setenv("MKERNEL_CONSTANTS", str(request.getfixturevalue("constants")))
    SCENARIOS[scenario](family, world)
