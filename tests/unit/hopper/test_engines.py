"""The choice of a copy engine from measured times. Needs no GPU."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from mkernel.backends.accelerators.cuda import _closed_forms
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.transfer.engines import Engines
from mkernel.errors import InputFileError


def curve(engine: str, blocks: int, *points: tuple[int, float]) -> dict[str, Any]:
    return {
        "engine": engine,
        "blocks": blocks,
        "points": [{"nbytes": n, "microseconds": us} for n, us in points],
    }


MEASURED = Engines.model_validate(
    {
        "source": "invented",
        "keeps_processors": 0.03,
        "directions": {
            "put": [
                curve("copy_engine", 0, (1000, 10.0), (100_000, 20.0)),
                curve("bulk", 4, (1000, 4.0), (100_000, 40.0)),
                curve("bulk", 16, (1000, 5.0), (100_000, 19.9)),
            ]
        },
    }
)


@pytest.mark.parametrize(
    ("nbytes", "max_blocks", "engine", "blocks"),
    [
        (1, 16, "bulk", 4),
        (1000, 16, "bulk", 4),
        (50_000, 16, "bulk", 16),
        (50_000, 8, "copy_engine", 0),
        (100_000, 16, "copy_engine", 0),  # not the fastest by 0.5 %, but it takes no processor
        (1 << 40, 16, "copy_engine", 0),
        (1, 0, "copy_engine", 0),
    ],
)
def test_the_fastest_that_fits(nbytes: int, max_blocks: int, engine: str, blocks: int) -> None:
    choice = MEASURED.choose("put", nbytes, max_blocks)
    assert (choice.engine, choice.blocks) == (engine, blocks)


def test_times_lie_on_the_lines_between_points() -> None:
    def bulk(nbytes: int) -> float:
        return MEASURED.microseconds("put", "bulk", 4, nbytes)

    assert bulk(10) == 4.0
    assert bulk(50_500) == pytest.approx(22.0)
    assert bulk(199_000) == pytest.approx(76.0)


def test_an_engine_can_be_named() -> None:
    assert MEASURED.microseconds("put", "bulk", 16, 1000) == 5.0
    with pytest.raises(ValueError, match="put by bulk on 8 blocks has no times"):
        MEASURED.microseconds("put", "bulk", 8, 1000)


def test_a_flag_costs_the_copy_engine_a_copy() -> None:
    assert MEASURED.choose("put", 100_000, flagged=True).engine == "bulk"
    alone = MEASURED.choose("put", 100_000, 0, flagged=True)
    assert (alone.engine, alone.microseconds) == ("copy_engine", 30.0)


def test_an_unmeasured_direction_is_said() -> None:
    with pytest.raises(ValueError, match=r"no engine is known for get .* bench/transfer\.py"):
        MEASURED.choose("get", 1)


def test_what_comes_with_the_package() -> None:
    engines = machine().copies
    assert engines.choose("put", 1 << 18).engine != "copy_engine"
    for direction in ("put", "get"):
        assert engines.choose(direction, 1 << 30).engine == "copy_engine"
    assert not engines.multicast


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"multicast": True}, "multicast"),
        ({"directions": {"put": [curve("bulk", 1, (5, 1.0), (4, 1.0))]}}, "sizes must ascend"),
        ({"directions": {"put": [curve("bulk", 1, (5, 1.0))]}}, "directions.put.0.points"),
        ({"directions": {"up": []}}, "directions.up"),
    ],
)
def test_a_bad_file_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text(json.dumps({**MEASURED.model_dump(mode="json"), **change}))
    with pytest.raises(InputFileError, match=message) as raised:
        Engines.from_file(file, "engine times")
    assert str(file) in str(raised.value)


def test_every_machine_finds_the_same_bits() -> None:
    """Ranks plan by these times. The digest is that of the same formulas in Python, before they were
    native."""
    curves = [
        (False, 4, [(1000, 4.1), (50_000, 17.3), (700_000, 91.7)]),
        (True, 0, [(1000, 9.7), (90_000, 11.9), (800_000, 31.3)]),
        (False, 16, [(1000, 5.3), (60_000, 13.7), (900_000, 47.9)]),
    ]
    put = _closed_forms.Copies(curves, 237.7, 0.03)
    parts = _closed_forms.Parts(2.3, 3.7, 1893.1, 3117.9, 1 << 22, 5.9, put)
    draw, found = random.Random(56), hashlib.sha256()
    for _ in range(300):
        m, n = (draw.randint(1, 1 << draw.randint(3, 24)) for _ in range(2))
        world, cut, size = draw.randint(2, 8), draw.randint(1, 4), draw.choice((1, 2, 4))
        m, own, part = world * m, draw.uniform(1, 999), draw.uniform(1, 999)
        curve, us = put.choose(m * n * size, draw.choice((0, 4, 16)), m % 2 == 0) or (9, 0.0)
        times = [
            us,
            put.microseconds(2, m * n),
            *parts.gathered(world, m, n, size, cut, own, part, n % 2 == 0),
        ]
        for whole in (False, True):
            times += parts.summed(whole, world, m, n, cut, 4, size, part)
        found.update(struct.pack(f"<B{len(times)}d", curve, *times))
    assert found.hexdigest() == BITS


BITS = "fb2a719a4fecd941275c2c3eaf1fdabfcf04843521dbf8d52a71447a3c9d31ad"
