"""`mkernel bench --model-only` as a user calls it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import commands
import pytest

from mkernel.backends.accelerators.ascend import reference
from mkernel.backends.accelerators.ascend.machine import load_machine
from mkernel.cli import bench
from mkernel.errors import ArgumentError, InputFileError
from mkernel.harness.modelled import ComparisonReport, ModelledReport, shapes
from mkernel.harness.shapes import shapes as sized
from mkernel.harness.spec import Shape
from mkernel.plan.shapes import DEFAULT_SIZES

MODEL = ("--accelerator", "ascend", "--model-only")


def run(*arguments: str) -> str:
    return commands.run(bench.command, *MODEL, *arguments)


@pytest.fixture
def two_rows(monkeypatch: pytest.MonkeyPatch) -> reference.PublishedTable:
    """The published table's two smallest rows: one fitted, one that checks."""
    whole = reference.published()
    short = whole.model_copy(update={"rows": whole.rows[:2]})
    monkeypatch.setattr(reference, "published", lambda: short)
    return short


def test_the_table_sets_published_modelled_and_ours_side_by_side(
    two_rows: reference.PublishedTable, tmp_path: Path
) -> None:
    file = tmp_path / "table.json"
    text = run("--table", "a3", "--json", str(file))
    report = ComparisonReport.model_validate_json(file.read_bytes())
    assert [row.published_ms for row in report.rows] == [row.ms for row in two_rows.rows]
    for row in report.rows:
        assert row.error == pytest.approx(row.reference_modelled_ms / row.published_ms - 1)
        assert row.speedup == pytest.approx(row.reference_modelled_ms / row.ours_modelled_ms)
        for number in (row.published_ms, row.reference_modelled_ms, row.ours_modelled_ms):
            assert f"{number:.3f}" in text
        for ms in (row.published_ms, row.ours_modelled_ms):
            assert f" {2 * row.m * row.k * row.n / ms / 1e9:.0f} " in text
    assert "published, TFLOP/s" in text
    assert "more ranks shorten what travels" in text
    first, second = report.rows
    assert report.mean_error == pytest.approx((abs(first.error) + abs(second.error)) / 2)
    assert report.worst_error == max(abs(first.error), abs(second.error))
    assert report.mean_error_of_checks == pytest.approx(abs(second.error))
    assert report.geometric_mean_speedup == pytest.approx((first.speedup * second.speedup) ** 0.5)
    assert "Modelled, not measured" in text


def _modelled(file: Path, *arguments: str) -> Any:
    sizes = ("--ranks", "2", "--shapes", "512x512x1024", "--json", str(file))
    assert "Modelled, not measured" in run("ag_gemm", *sizes, *arguments)
    return ModelledReport.model_validate_json(file.read_bytes())


def test_shapes_in_three_views(tmp_path: Path) -> None:
    (row,) = _modelled(tmp_path / "a.json").rows
    clock = row.modelled
    assert max(clock.compute_only_ms, clock.comm_only_ms) < clock.pipelined_ms
    assert clock.pipelined_ms < clock.sequential_ms
    assert clock.speedup == pytest.approx(clock.sequential_ms / clock.pipelined_ms)


def test_eight_ranks_of_4096_cubed_are_modelled_in_seconds() -> None:
    """CPU time, which does not depend on what else the host does."""
    shape = Shape(op="all_gather_gemm", m=4096, n=4096, k=4096)
    start = time.process_time()
    (row,) = shapes([shape], 8, "float16", "row", load_machine()).rows
    assert time.process_time() - start < 10
    assert row.modelled.pipelined_ms < row.modelled.sequential_ms


def test_the_machine_is_the_callers(tmp_path: Path) -> None:
    data = load_machine().model_dump()
    data["name"], data["fabric"]["link_gbs"] = "mine", data["fabric"]["link_gbs"] / 4
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(data))
    slow = _modelled(tmp_path / "b.json", "--machine", str(mine))
    assert slow.machine.name == "mine"
    fast = _modelled(tmp_path / "a.json").rows[0].modelled
    assert slow.rows[0].modelled.comm_only_ms > 3 * fast.comm_only_ms
    assert slow.rows[0].modelled.compute_only_ms == fast.compute_only_ms


@pytest.mark.parametrize(
    ("arguments", "error", "why"),
    [
        (("--table", "a9"), ArgumentError, "--table = 'a9' .* one of: a3"),
        (("--accelerator", "streams"), ArgumentError, "--accelerator = streams .* ascend"),
        (("--machine", "absent.json"), InputFileError, r"absent\.json: No such file"),
        (("--explain", "--table", "a3"), ArgumentError, "--explain .* nothing beside --table"),
        (("--nodes", "2"), ArgumentError, "--nodes = 2 .* expected nothing: --model-only"),
        (("--mode", "graph"), ArgumentError, "--mode = graph .* expected nothing: --model-only"),
    ],
)
def test_wrong_options_are_named(
    arguments: tuple[str, ...], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        run(*arguments)


def test_options_of_the_model_need_the_model() -> None:
    with pytest.raises(ArgumentError, match="--model-only"):
        commands.run(bench.command, "--table", "a3")


def test_no_figures_of_shared_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_RANKS_PER_DEVICE", "2")
    small = ("--shapes", "64x64x64", "--peers", "none", "--iterations", "1")
    with pytest.raises(ArgumentError, match="MKERNEL_RANKS_PER_DEVICE = 2"):
        commands.run(bench.command, "ag_gemm", "--accelerator", "streams", "--ranks", "2", *small)


def test_every_op_by_its_own_sizes(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    asked = ("--ranks", "2", "--shapes", "m=512 n=256, m=1024 n=256 k=128")
    run("gemm_rs,gemm_ar", *asked, "--json", str(file))
    rows = ModelledReport.model_validate_json(file.read_bytes()).rows
    ops = ("gemm_reduce_scatter",) * 2 + ("gemm_all_reduce",) * 2
    assert tuple(row.shape.op for row in rows) == ops
    assert [tuple(row.shape.sizes.values()) for row in rows] == [
        (512, 256, 512),
        (1024, 256, 128),
    ] * 2


def test_explained_rows_fit_a_terminal_of_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "a.json"
    sizes = ("--ranks", "8", "--shapes", "1024x512x512", "--json", str(file))
    text = run("gemm_ar", "--explain", *sizes)
    assert max(map(len, text.splitlines())) <= 80
    (row,) = ModelledReport.model_validate_json(file.read_bytes()).rows
    why = row.explained
    assert why is not None
    assert why.use.pipelined_us == pytest.approx(1e3 * row.modelled.pipelined_ms)
    assert max(one.us for one in why.floors) < why.floor_us < why.use.pipelined_us
    for said in (
        "communication alone",
        "link to each rank",
        "the comm kernel waits",
        "egress takes",
    ):
        assert said in " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sequence=2k", "'sequence=2k' .* an integer"),
        ("m=512", "--m = 512 .* takes batch, heads"),
        ("512x512x512", "'name=value name=value' .*ring_attention: batch, heads"),
    ],
)
def test_sizes_that_are_not_an_ops(text: str, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        sized(text, ["ring_attention"], 2)


def test_sizes_that_are_not_given_are_those_of_mkernel_run() -> None:
    (attention,) = sized("sequence=2048 causal=1", ["ring_attention"], 2)
    assert attention.sizes == {**DEFAULT_SIZES["ring_attention"], "sequence": 2048, "causal": 1}
    *gemms, moe = sized(None, ["all_gather_gemm", "moe_dispatch_gemm"], 4)
    assert moe.sizes == DEFAULT_SIZES["moe_dispatch_gemm"]
    assert {each.op for each in gemms} == {"all_gather_gemm"}
