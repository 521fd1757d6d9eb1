"""The page, the table and the picture of a result: misses first, wrong contenders without figures."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from shipped import constants_of

from mkernel.cases import Comparison
from mkernel.errors import InputFileError
from mkernel.harness import bench_report as report
from mkernel.harness import bench_run, draws, figures, gains, gpu_tests, numbers, plot, results
from mkernel.harness.gpu_tests import TestRun
from mkernel.harness.problem import Kind
from mkernel.harness.results import Conditions, Report, Route, Row, Timing
from mkernel.harness.spec import BenchSpec, Shape
from mkernel.harness.turns import Turns

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "bench"))

import numbers_page  # noqa: E402
import results_file  # noqa: E402

FRESH = 987_654_321
"""A seed that nothing was fitted to."""

KINDS: dict[str, Kind] = {
    "mkernel": "op",
    "nccl+cublas": "op",
    "gemm": "compute",
    "comm": "communication",
}


def turns(microseconds: float, error: float = 1e-3) -> Turns:
    return Turns([microseconds * 1e-6] * 3, {"out": Comparison(error, 1)}, {"out": 3e-3})


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


def test_a_summary_is_the_result_without_its_turns(tmp_path: Path) -> None:
    raw, brief = made(120), tmp_path / "brief.json"
    results.write(raw, tmp_path / "x.json")
    brief.write_text(results_file.laid_out(results_file.summary(raw)))
    found = results.read(brief)
    assert found is not None
    assert (found.spec, found.provenance, found.passed) == (raw.spec, raw.provenance, True)
    (old,), (new,) = raw.rows, found.rows
    assert new.entries.keys() == old.entries.keys()
    for name, entry in old.entries.items():
        kept, figures = new.entries[name], entry.figures
        assert (kept.state, kept.turns, kept.dropped) == (entry.state, 3, entry.dropped)
        assert kept.seconds == kept.skew_us == ()
        assert kept.figures is not None
        assert figures is not None
        assert kept.figures.median_us == pytest.approx(figures.median_us, rel=1e-5)
        assert kept.figures.p90_us == pytest.approx(figures.p90_us, rel=1e-3)
    assert new.to_best == pytest.approx(old.to_best, rel=1e-4)
    assert new.meets_target == old.meets_target
    wrong = tmp_path / "wrong.json"
    wrong.write_text(results_file.laid_out(results_file.summary(made(120, error=0.25))))
    again = results.read(wrong)
    assert again is not None
    assert not again.passed


def test_a_result_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    results.write(made(120), path)
    path.write_text(path.read_text().replace("mkernel-bench-1", "mkernel-bench-7"))
    with pytest.raises(InputFileError, match="'mkernel-bench-7' is of another version") as refused:
        numbers.page(tmp_path)
    assert "reads 'mkernel-bench-1'" in str(refused.value)


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
def test_misses_come_before_the_tables(tmp_path: Path, report: Report, says: str) -> None:
    text = page(tmp_path, made(120), report)
    line = next(line for line in text.splitlines() if says in line)
    assert "run1" in line
    assert "gemm_ar 64 x 32 x 16 (tiny)" in line
    assert text.index(line) < text.index("## run0")


def test_gains_open_the_page(tmp_path: Path) -> None:
    text = page(tmp_path, made(100), made(160))
    assert text.index("## What a user gains") < text.index("## What misses its target")
    for run, gain in (("run0", "2.00"), ("run1", "1.25")):
        row = next(line for line in text.splitlines() if line.startswith(f"| {run} |"))
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        assert cells == [
            run, "sizes as given", "2 x a GPU", "kernel", "nccl+cublas",
            "gemm_ar", "1", gain, gain, gain, "1 of 1", "", "", f"{gain} (1)", gain,
            "`01234567`, 2026-01-01",
        ]  # fmt: skip


def later(report: Report, **changes: object) -> Report:
    """The same, measured a month later at another commit."""
    source = {**report.provenance, "date": "2026-02-02", "commit": "fedcba9876543210"}
    return report.model_copy(update={"provenance": source, **changes})


def test_the_newest_file_of_a_kind_stands_for_it(tmp_path: Path) -> None:
    text = page(tmp_path, made(120), later(made(125)))
    assert "## run0" not in text
    assert "## run1" in text
    old = next(line for line in text.splitlines() if line.startswith("| run0 |"))
    assert text.index("## Older results") < text.index(old)
    assert old.endswith("| run1 |")
    assert "`01234567`, 2026-01-01" in old


def without_its_peer(row: Row, state: str = "absent", why: str = "") -> Row:
    peer = row.entries["nccl+cublas"].model_copy(
        update={"state": state, "why": why, "figures": None}
    )
    entries = {**row.entries, "nccl+cublas": peer}
    return row.model_copy(update={"entries": entries, "best_peer": None, "to_best": None})


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": 4},
        {"nodes": 2},
        {"accelerator": "streams"},
        {"spec": made(120).spec.model_copy(update={"launches": True})},
        {"spec": made(120).spec.model_copy(update={"dtype": "float16"})},
        {"rows": (without_its_peer(made(120).rows[0]),)},
    ],
    ids=["ranks", "nodes", "accelerator", "launches", "dtype", "a peer less"],
)  # fmt: skip
def test_a_later_file_of_another_kind_takes_no_place(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    text = page(tmp_path, made(120), later(made(120), **changes))
    old, new = text.split("## run0")[1], text.split("## run1")[1]
    assert "**Not repeated** at `fedcba987654`, the newest commit of other results" in old
    assert "Not repeated" not in new


def drawn(seed: int, *times: float, rows_from: int = 2002) -> Report:
    """Draws of one op, by mkernel's times beside a peer's 200 us."""
    base = told()
    shapes = tuple(
        Shape(op="gemm_all_reduce", m=2 * place + rows_from, n=8, k=8, layout="row")
        for place in range(len(times))
    )
    rows = tuple(
        made(time).rows[0].model_copy(update={"shape": shape})
        for time, shape in zip(times, shapes, strict=True)
    )
    spec = base.spec.model_copy(update={"source": "random", "seed": seed, "shapes": shapes})
    return base.model_copy(update={"spec": spec, "rows": rows})


def test_a_new_draw_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    text = page(tmp_path, drawn(7, 100, 100, 100), later(drawn(FRESH, 160)))
    assert f"| run1 | drawn, seed {FRESH} (held out) |" in text
    old = next(line for line in text.splitlines() if line.startswith("| run0 |"))
    assert "drawn, seed 7 (spent)" in old
    assert old.endswith("| run1 |")


def test_draws_of_few_rows_take_the_place_of_such_draws_alone(tmp_path: Path) -> None:
    few = later(drawn(FRESH, 160, rows_from=2))
    text = page(tmp_path, drawn(7, 100, 100, 100), few)
    assert f"| run1 | drawn, at most 1024 rows, seed {FRESH} (held out) |" in text
    old = next(line for line in text.splitlines() if line.startswith("| run0 |"))
    assert not old.endswith("| run1 |")


def test_on_one_day_a_held_out_draw_is_the_newest(tmp_path: Path) -> None:
    text = page(tmp_path, drawn(FRESH, 160), drawn(7, 100))
    assert "## run0" in text
    assert "## run1" not in text


def test_rows_without_a_ratio_are_counted_and_named(tmp_path: Path) -> None:
    one = drawn(FRESH, 100, 160, 100)
    lost = without_its_peer(one.rows[1], "wrong", "wrong: 3e-02")
    text = page(tmp_path, one.model_copy(update={"rows": (one.rows[0], lost, one.rows[2])}))
    assert "| nccl+cublas (2) | gemm_ar | 2 of 3 | 2.00 |" in text
    assert "- run0, kernel: gemm_ar 2004 x 8 x 8: nccl+cublas wrong: wrong: 3e-02" in text


def test_means_are_told_by_how_long_calls_take() -> None:
    peers = ((10.0, 5.0), (100.0, 100.0), (100.0, 50.0), (1000.0, 2000.0))
    rows = [gains.Gain(None, "x", "", mine, {"peer": best}) for best, mine in peers]
    bands = gains.bands(rows)
    assert [len(band) for band in bands] == [1, 2, 1]
    assert [gains.mean(band) for band in bands] == pytest.approx([2.0, 2**0.5, 0.5])
    assert gains.by_time(rows) == pytest.approx(1210 / 2155)


def test_whole_layers_are_on_the_page(tmp_path: Path) -> None:
    times = {"library": 100.0, "symm_mem": "RuntimeError: no", "mkernel": 125.0}
    row = {"layer": "mlp", "tokens": 128, "backward": True, "mode": "compiled", "us": times}
    content = {
        "format": "mkernel-figures-1", "commit": "abcdef0123456789", "date": "2026-01-01",
        "hardware": {"cpu": "a CPU"}, "figures": {"rows": [row]},
    }  # fmt: skip
    (tmp_path / "whole_layers.json").write_text(json.dumps(content))
    text = page(tmp_path, made(120))
    assert (
        "| whole_layers | whole layers | 2 x GPU | compiled, with backward | library | mlp" in text
    )
    assert "| mlp | 128 tokens | compiled, with backward | 100.0 | 125.0 | 0.80 |" in text
    assert "- whole_layers: mlp 128 tokens, compiled, with backward: 1.250 of the best" in text


def test_whole_models_are_on_the_page(tmp_path: Path) -> None:
    times = {"torch graph": 100.0, "async graph": 95.0, "pass graph": 80.0, "floor graph": 70.0}
    entries = {name: {"median_us": us} for name, us in times.items()}
    entries["nn graph"] = {"failed": "wrong: result"}  # type: ignore[dict-item]
    row = {"width": "70b", "tokens": 512, "batch": 4, "measure": "step", "contenders": entries}
    content = {
        "format": "mkernel-figures-1", "commit": "abcdef0123456789", "date": "2026-01-01",
        "hardware": {"cpu": "a CPU"}, "figures": {"rows": [row]},
    }  # fmt: skip
    (tmp_path / "whole_models.json").write_text(json.dumps(content))
    text = page(tmp_path, made(120))
    assert (
        "| whole_models | whole models | 2 x GPU | step, graph, pass | torch, async | Llama" in text
    )
    assert (
        "| Llama 70b | 512 tokens, B 4 | step, graph, pass | 95.0 | 100.0 | 80.0 | 1.19 |" in text
    )
    assert "| Llama 70b | 512 tokens, B 4 | step, graph, nn | 95.0 | 100.0 | - | - |" in text


def test_an_old_file_says_what_was_not_recorded(tmp_path: Path) -> None:
    text = page(tmp_path, made(120))
    for part in ("launches hidden", "skew not recorded", "symm_mem: not recorded",
                 "fitted to: not recorded", "how it is known was not recorded"):  # fmt: skip
        assert part in text, part


def told(**changes: object) -> Report:
    """A report of today."""
    timing = Timing(
        clock="events", launches="hidden", start="instant", most_skew_us=10, median_skew_us=1.25,
        turns=40, dropped=3, clock_error_us=0.97,
    )  # fmt: skip
    environment = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    conditions = Conditions(environment=environment, planner="x", fitted_to=("layers", "targets"))
    source = {**made(120).provenance, "commit_from": "git"}
    spec = made(120).spec.model_copy(update={"source": "layers"})
    base = {
        "timing": {"kernel": timing},
        "conditions": conditions,
        "provenance": source,
        "spec": spec,
    }
    return made(120).model_copy(update={**base, **changes})


def sized(m: int, n: int, k: int) -> Report:
    """The same of one shape, whose sizes were given."""
    row = told().rows[0]
    shape = Shape(op="gemm_all_reduce", m=m, n=n, k=k)
    spec = told().spec.model_copy(update={"source": f"{m}x{n}x{k}"})
    return told(rows=(row.model_copy(update={"shape": shape}),), spec=spec)


def recorded_as_spent(seed: int) -> Report:
    """A draw whose file says that its seed was spent."""
    conditions = told().conditions
    assert conditions is not None
    return drawn(seed, 120).model_copy(
        update={"conditions": conditions.model_copy(update={"spent_seeds": (seed,)})}
    )


def test_results_record_which_seeds_were_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = constants_of("hopper")
    claims = SimpleNamespace(
        constants_by=lambda file, more: (constants, *more), library_ops=("gemm_all_reduce",)
    )
    backend = SimpleNamespace(
        capabilities=lambda: claims, probe=tuple, cards_of=lambda topology: ()
    )
    monkeypatch.setattr(bench_run.registry, "accelerator", lambda name: backend)
    assert set(bench_run.conditions("any").spent_seeds) == draws.SPENT.keys()


def over_a_nic(*routes: Route) -> Report:
    """The same of two nodes."""
    hardware = {**made(120).provenance["hardware"], "emulated_nic": {"MKERNEL_SOFTVERBS_SEED": "1"}}
    return told(provenance={**told().provenance, "hardware": hardware}, routes=routes)


HIDDEN = told().timing["kernel"]


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (told(), "launches hidden: what a call costs the host is not in its time"),
        (told(), "ranks start at an agreed instant, median skew 1.25 us by clocks known to 0.970 us, "
         "3 of 40 turns dropped"),
        (told(), "above 10.0 us"),
        (told(timing={"kernel": HIDDEN.model_copy(update={"launches": "counted"})}),
         "launches counted: what a call costs the host is in its time"),
        (told(timing={"kernel": HIDDEN.model_copy(update={"median_skew_us": None})}),
         "ranks start behind a barrier, their skew not measured"),
        (told(timing={"kernel": HIDDEN.model_copy(
            update={"median_skew_us": 1234.0, "clock_error_us": 2500.0, "most_skew_us": 25e3})}),
         "median skew 1.23 ms by clocks known to 2.50 ms, 3 of 40 turns dropped for a skew above "
         "25.0 ms"),
        (told(), "without multicast, as these machines require (NCCL_NVLS_ENABLE=0, "
         "TORCH_SYMM_MEM_DISABLE_MULTICAST=1)"),
        (told(), "fitted to other shapes (layers, targets)"),
        (sized(8192, 7168, 8192), "**Not held out**: the constants by which the planner chooses a path "
         "were fitted to these shapes, or choices were made by them (targets)."),
        (drawn(FRESH, 120), "fitted to other shapes (layers, targets), and no choice was made by this "
         "seed: they are held out."),
        (drawn(7, 120), "**Not held out**"),
        (drawn(7, 120), "(seed 7: `library.streamed` was fitted to it"),
        (recorded_as_spent(FRESH), f"(seed {FRESH}: spent when this was measured)"),
        (sized(*draws.drawn(1, 31, ("gemm_all_reduce",), 2)[0].named_sizes.values()), "(seed 31: "),
        (told(spec=made(120).spec.model_copy(update={"scales": "row"})),
         "What the planner's constants for these ops were fitted to: not recorded."),
        (told(conditions=Conditions(environment={})), "The backend has one path"),
        (told(), "Commit `0123456789ab`, read from git, no changes."),
        (told(provenance={**told().provenance, "commit_from": "asserted", "dirty": None}),
         "Commit `0123456789ab`, asserted, not read from git, changes unknown."),
        (told(provenance={**told().provenance, "dirty": True}), "with uncommitted changes"),
        (over_a_nic("direct"), "(MKERNEL_SOFTVERBS_SEED=1). Route: direct, from accelerators' memory "
         "and into it. It shows"),
        (over_a_nic("staged"), "Route: staged, by host memory at both ends. It shows"),
        (over_a_nic(), "Route: not recorded."),
    ],
)  # fmt: skip
def test_what_figures_depend_on_is_said_above_them(
    tmp_path: Path, outcome: Report, says: str
) -> None:
    text = page(tmp_path, outcome)
    assert says in text.split("## run0")[1]
    results.write(outcome, tmp_path / "x.json")
    assert results.read(tmp_path / "x.json") == outcome


def test_rows_of_several_modes_say_theirs(tmp_path: Path) -> None:
    one = made(120)
    row = one.rows[0].model_copy(update={"mode": "eager"})
    both = one.model_copy(
        update={
            "rows": (*one.rows, row),
            "spec": one.spec.model_copy(update={"modes": ("kernel", "eager")}),
        }
    )
    text = page(tmp_path, both)
    assert "| tiny | kernel |" in text
    assert "| tiny | eager |" in text
    assert "| 2 x a GPU | eager | nccl+cublas | gemm_ar |" in text
    console = Console(width=200)
    with console.capture() as capture:
        console.print(report.table(both))
    assert "eager" in capture.get()


def run_of(passed: int, commit: str = "a" * 40, per_device: int = 1) -> TestRun:
    return TestRun(
        selection=("tests/gpu",), ranks_per_device=per_device, seconds=12.6,
        counts={"passed": passed, "skipped": 3}, skips={"needs 4 GPU(s)": 3},
        provenance={**made(120).provenance, "commit": commit, "commit_from": "git"},
    )  # fmt: skip


def test_groups_of_gpu_tests_that_end_together_are_all_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = gpu_tests.read

    def slow(path: Path) -> gpu_tests.TestRuns | None:
        found = honest(path)
        time.sleep(0.02)  # whoever does not take turns has read the same by now
        return found

    monkeypatch.setattr(gpu_tests, "read", slow)
    file = tmp_path / gpu_tests.FILE
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda ranks: gpu_tests.add(run_of(1, per_device=ranks), file), range(1, 9)))
    found = honest(file)
    assert found is not None
    assert {run.ranks_per_device for run in found.runs} == set(range(1, 9))


def test_gpu_tests_are_on_the_page(tmp_path: Path) -> None:
    file = tmp_path / gpu_tests.FILE
    gpu_tests.add(run_of(100), file)
    gpu_tests.add(run_of(200, per_device=2), file)
    gpu_tests.add(run_of(150), file)  # the same kind again
    text = page(tmp_path, made(120)).split("## Tests on GPUs")[1]
    for part in ("**150 passed, 3 skipped** in 13 s", "**200 passed, 3 skipped**", "2 rank(s)",
                 "- skipped 3: needs 4 GPU(s)", "4x a GPU", "read from git"):  # fmt: skip
        assert part in text, part
    assert "100 passed" not in text
    gpu_tests.add(run_of(7, commit="b" * 40), file)
    found = gpu_tests.read(file)
    assert found is not None
    assert [run.counts["passed"] for run in found.runs] == [7]


def test_uncommitted_changes_are_said(tmp_path: Path) -> None:
    assert "do not quote" in page(tmp_path, made(120, dirty=True))


def test_no_results_are_said(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no result"):
        page(tmp_path)


@pytest.mark.parametrize(
    ("outcome", "passed", "parts"),
    [
        (made(120), True, ("120", "1 of 1 targets met", "ahead of the best peer in 1 of 1")),
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


def test_the_page_is_made_from_the_committed_results() -> None:
    """Else: ``make numbers``."""
    assert numbers_page.PAGE.read_text() == numbers_page.page()
    assert len(numbers_page.page().splitlines()) <= 100


def test_every_result_with_a_peer_is_on_the_page() -> None:
    newest = gains.newest(gains.all_series(numbers_page.RESULTS))
    page = numbers_page.page()
    assert [one.file for one in newest if one.ratios and f"`{one.file}`" not in page] == []
    assert numbers.page(numbers_page.RESULTS).startswith("# Measured numbers")
