"""The page, the table and the picture of a result: misses first, wrong contenders without figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from mkernel.bench import figures, numbers, plot, report, results
from mkernel.bench.problem import Kind
from mkernel.bench.rank import Turns
from mkernel.bench.results import Report
from mkernel.bench.spec import BenchSpec, Shape
from mkernel.errors import InputFileError

ROOT = Path(__file__).parents[3]

KINDS: dict[str, Kind] = {
    "mkernel": "op",
    "nccl+cublas": "op",
    "gemm": "compute",
    "comm": "communication",
}


def turns(microseconds: float, error: float = 1e-3) -> Turns:
    return Turns([microseconds * 1e-6] * 3, [error] * 3, 3e-3)


def made(mine: float, error: float = 1e-3, dirty: bool = False) -> Report:
    shape = Shape(op="gemm_all_reduce", m=64, n=32, k=16, name="tiny", target=1.5, target_ranks=2)
    found = {
        "mkernel": turns(mine, error),
        "nccl+cublas": turns(200),
        "gemm": turns(100),
        "comm": turns(80),
    }
    return Report(
        name="x",
        ranks=2,
        accelerator="hopper",
        spec=BenchSpec(shapes=(shape,), contenders=tuple(KINDS)),
        provenance={
            "commit": "0123456789abcdef",
            "dirty": dirty,
            "date": "2026-01-01",
            "hardware": {"cpu": "a CPU", "cores": 8, "gpus": ["a GPU"] * 4, "driver": "580.1"},
            "software": {"torch": "2.11"},
        },
        rows=(figures.row(shape, KINDS, [found, found], 2, "hopper"),),
    )


def page(tmp_path: Path, *reports: Report) -> str:
    for number, each in enumerate(reports):
        results.write(each, tmp_path / f"run{number}.json")
    (tmp_path / "other.json").write_text('{"benchmark": "something else"}')
    return numbers.page(tmp_path)


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    results.write(made(120), tmp_path / "x.json")
    assert results.read(tmp_path / "x.json") == made(120)


def test_nothing_missed(tmp_path: Path) -> None:
    text = page(tmp_path, made(120))
    assert "Nothing." in text
    assert "**missed**" not in text
    for part in ("1.5 met", "120.0", "0123456789ab", "2 of 4x a GPU", "driver 580.1", "tiny",
                 "64 x 32 x 16", "torch 2.11"):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (made(160), "1.600 of the product alone, target 1.5"),
        (made(210), "1.050 of the best peer (nccl+cublas)"),
        (made(90, error=0.25), "mkernel wrong: wrong: 2e-01"),
    ],
)
def test_misses_come_first(tmp_path: Path, report: Report, says: str) -> None:
    text = page(tmp_path, made(120), report)
    line = next(line for line in text.splitlines() if says in line)
    assert "run1" in line
    assert "gemm_ar 64 x 32 x 16 (tiny)" in line
    assert text.index(line) < text.index("## run0")


def test_uncommitted_changes_are_said(tmp_path: Path) -> None:
    assert "do not quote" in page(tmp_path, made(120, dirty=True))


def test_no_results_are_said(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no result"):
        page(tmp_path)


@pytest.mark.parametrize(
    ("outcome", "passed", "parts"),
    [
        (made(120), True, ("120.0", "1 of 1 targets met", "ahead of the best peer in 1 of 1")),
        (made(160), True, ("1.600", "missed", "0 of 1 targets met")),
        (made(90, error=float("inf")), False, ("wrong: not finite", "FAILED")),
    ],
)
def test_table(outcome: Report, passed: bool, parts: tuple[str, ...]) -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(report.table(outcome))
        console.print(report.verdict(outcome), soft_wrap=True)
    assert outcome.passed is passed
    for part in parts:
        assert part in capture.get(), part


def test_picture(tmp_path: Path) -> None:
    plot.write(made(120), tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000


def test_the_page_is_made_from_the_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else: ``make numbers``."""
    monkeypatch.chdir(ROOT)
    assert Path("docs/numbers.md").read_text() == numbers.page(Path("bench/results"))
