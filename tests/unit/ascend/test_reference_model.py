"""The published schedule under the timed model, and the table that compares it with ours."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
from published_table import published_table

from mkernel.backends.accelerators.ascend.backend import record
from mkernel.backends.accelerators.ascend.reference import Shape, published, trace
from mkernel.backends.accelerators.ascend.timeline import model
from mkernel.backends.accelerators.ascend.trace import Kind, Pipe, Role, cores

from .rig import A3, changed, first, make_plan

SOURCE = Path(__file__).parents[3] / "backends" / "accelerators" / "ascend"
SMALL = Shape(ranks=4, m=2048, k=1024, n=512)


def amount(blob: bytes, *kinds: Kind) -> int:
    return sum(int(r["amount"][np.isin(r["kind"], kinds)].sum()) for _, r in cores(blob))


@pytest.mark.parametrize(
    ("file", "name", "known"),
    [
        ("sim/trace.hpp", "Kind", Kind),
        ("sim/trace.hpp", "Role", Role),
        ("isa/pipe.hpp", "Pipe", Pipe),
    ],
)
def test_enumerations_are_the_native_ones(file: str, name: str, known: type[IntEnum]) -> None:
    text = (SOURCE / file).read_text()
    body = re.search(rf"enum class {name} : [^{{]*{{(.*?)}};", text, re.DOTALL)
    assert body is not None
    native = {each.upper(): int(value) for each, value in re.findall(r"(\w+) = (\d+)", body[1])}
    native.pop("ALL", None)  # of fences only
    assert {each.name: each.value for each in known} == native


def test_published_and_own_kernels_do_the_same_work() -> None:
    """Also what keeps the layout of a record here equal to the native one."""
    s = SMALL
    own = record(make_plan(s.m, s.n, s.k, ranks_per_node=s.ranks), 1)
    theirs = trace(s, 1)
    for kinds in ((Kind.TMATMUL, Kind.TMATMUL_ACC), (Kind.TPUT,), (Kind.TSTORE,)):
        assert amount(own, *kinds) == amount(theirs, *kinds)
    # 32 tiles on 24 cores: eight take a second one, for which L1 has kept a K tile of B, 256 x 256.
    assert amount(own, Kind.TLOAD) == amount(theirs, Kind.TLOAD) - 8 * 256 * 256 * 2
    assert amount(theirs, Kind.TMATMUL, Kind.TMATMUL_ACC) == s.m * s.k * s.n
    assert amount(theirs, Kind.TPUT) == (s.ranks - 1) * s.m // s.ranks * s.k * 2


def test_compute_takes_whole_row_groups() -> None:
    """16 row groups keep 16 of 24 cores busy, however wide B is."""
    busy = [bool((r["kind"] == Kind.TMATMUL).any()) for k, r in cores(trace(SMALL, 0)) if k == 0]
    assert (len(busy), sum(busy)) == (24, 16)


@pytest.mark.parametrize(
    ("m", "tiles", "chunks"), [(256, 4, 4), (8192, 4, 128), (16384, 8, 128), (262144, 64, 256)]
)
def test_chunks(m: int, tiles: int, chunks: int) -> None:
    shape = Shape(ranks=2, m=m, k=4096, n=256)
    assert (shape.chunk_tiles, shape.chunks) == (tiles, chunks)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((2, 128, 256, 256), "m = 128: the published kernels take multiples of 256"),
        ((2, 256, 128, 256), "k = 128: .* multiples of 256"),
        ((2, 256, 256, 0), "n = 0: .* multiples of 256"),
    ],
)
def test_shapes_that_the_published_kernels_do_not_take(
    sizes: tuple[int, int, int, int], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        Shape(*sizes)


def test_a_notification_that_is_left_out_is_reported() -> None:
    traces = [trace(SMALL, rank) for rank in range(SMALL.ranks)]
    assert model(traces, A3).total_us > 0
    broken = bytearray(traces[0])
    first(broken, Kind.TNOTIFY)["kind"] = Kind.FENCE
    with pytest.raises(RuntimeError, match=r"rank \d AIC core \d+ waits for signal \d+ of rank 0"):
        model([bytes(broken), *traces[1:]], A3)


def test_the_model_reproduces_the_published_table(request: pytest.FixtureRequest) -> None:
    report = published_table(request)
    assert report.machine == A3
    assert len(report.rows) == 8
    assert sum(row.fitted for row in report.rows) == 4
    assert report.mean_error <= 0.065
    assert report.worst_error <= 0.12
    assert report.mean_error_of_checks <= 0.065
    assert report.geometric_mean_speedup >= 1.15
    assert all(row.speedup > 1 for row in report.rows)


def test_other_constants_do_not_reproduce_it() -> None:
    """Planted fault: the same model with the constants that were guessed before the fit."""
    guessed = changed(fabric={"efficiency": 0.5}, pipes={"mte2_gbs": 110.0})
    rows = [row for row in published().rows if row.ranks == 2]
    errors = [
        model([trace(row.shape, r) for r in range(row.ranks)], guessed, tracks=False).total_us
        / 1e3
        / row.ms
        - 1
        for row in rows
    ]
    assert min(errors) > 0.12
