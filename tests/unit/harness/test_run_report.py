"""The three views' figures, from known times."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mkernel.backends.contracts.instrumented import KernelSpan, ModelledRun, Span, Track
from mkernel.cases import Comparison, case_of
from mkernel.harness import run_report as report
from mkernel.harness import timeline
from mkernel.harness.turns import Turns
from mkernel.harness.verdict import verify
from mkernel.plan.model import Prediction


def test_formulae() -> None:
    each = report.clock(compute=6.0, comm=4.0, sequential=10.0, pipelined=7.0)
    assert each.speedup == pytest.approx(10 / 7)
    assert each.overlap_efficiency == pytest.approx((6 + 4 - 7) / 4)


def test_one_rank_has_nothing_to_overlap() -> None:
    each = report.clock(compute=6.0, comm=0.0, sequential=6.0, pipelined=6.0)
    assert (each.speedup, each.overlap_efficiency) == (1.0, 0.0)
    each = report.clock(compute=6.0, comm=0.0, sequential=6.0, pipelined=6.0, launch=2.0)
    assert (each.speedup, each.overlap_efficiency) == (1.0, 0.0)


@pytest.mark.parametrize("launch", [0.0, 5.0, 200.0])
@pytest.mark.parametrize(("pipelined", "overlap"), [(11.0, 0.0), (9.0, 0.5), (7.0, 1.0)])
def test_a_launch_is_in_each_part_and_in_the_whole(
    launch: float, pipelined: float, overlap: float
) -> None:
    """A long one makes overlap neither better nor worse, in no clock."""
    each = report.clock(
        7.0 + launch, 4.0 + launch, 11.0 + launch, pipelined + launch, launch=launch
    )
    assert each.overlap_efficiency == pytest.approx(overlap)
    times = Prediction(
        compute_us=7.0, comm_us=4.0, sequential_us=11.0 + launch, pipelined_us=pipelined + launch,
        constants="known",
    )  # fmt: skip
    made = SimpleNamespace(
        plan=SimpleNamespace(prediction=times), topology=SimpleNamespace(nodes=()), modelled=each
    )
    predicted = report._predicted_clock(cast(Any, made), measured=True)
    assert predicted is not None
    assert predicted.overlap_efficiency == pytest.approx(overlap)
    assert predicted.compute_only_ms == pytest.approx((7.0 + launch) / 1e3)
    assert predicted.comm_only_ms == pytest.approx((4.0 + launch) / 1e3)
    assert report._cost_model(times) == "by the planner's cost model"
    guess = times.model_copy(update={"constants": "a100, never measured", "measured": False})
    assert report._cost_model(guess).endswith(" (a100, never measured)")
    runs: report.Views = {
        view: ModelledRun(
            "a machine", view, total + launch, (KernelSpan(0, "comm", launch, total + launch),), ()
        )
        for view, total in (("compute_only", 7.0), ("sequential", 11.0), ("pipelined", pipelined))
    }
    modelled = report.modelled_clock([runs], 4.0 + launch)
    assert modelled.overlap_efficiency == pytest.approx(overlap)


def test_the_slowest_rank_of_the_median_iteration_counts() -> None:
    samples = [[1.0, 9.0, 3.0], [2.0, 1.0, 4.0]]  # slowest: 2, 9, 4
    assert report.slowest(samples) == 4.0
    assert report.spread(samples) == 7.0


@pytest.mark.parametrize(
    ("first", "then", "found"),
    [
        (("comm", 1.0, 5.0), ("compute", 350.0, 400.0), 350.0),
        (("compute", 1.0, 350.0), ("comm", 349.0, 400.0), 51.0),
    ],
    ids=["until the bytes have arrived", "to the end where compute comes first"],
)
def test_communication_lasts(
    first: tuple[str, float, float], then: tuple[str, float, float], found: float
) -> None:
    """Where it comes first, not until the kernel that sent the bytes has returned."""
    kernel, start, end = then
    kernels = [KernelSpan(rank, *first) for rank in (0, 1)]
    kernels += [KernelSpan(rank, kernel, start + rank, end) for rank in (0, 1)]
    run = ModelledRun("a machine", "sequential", 400.0, tuple(kernels), ())
    assert report._comm_us(run) == found


def test_what_overlap_gains_below_the_noise_is_not_shown() -> None:
    loud = report.clock(200.0, 4.0, 210.0, 190.0, noise=20.0)
    quiet = report.clock(200.0, 40.0, 240.0, 210.0, noise=20.0)
    assert report._unless_noisy(loud, "1.11x") == "noise"
    assert report._unless_noisy(quiet, "1.14x") == "1.14x"


def test_more_than_all_of_a_part_is_not_hidden() -> None:
    """As measured on a laptop, where communication alone took 45 ms and ring attention 32."""
    assert report._efficiency(report.clock(26.5, 44.8, 46.0, 31.6)) == "noise"
    assert report._efficiency(report.clock(40.0, 20.0, 60.0, 40.0)) == "100%"


@pytest.mark.parametrize(
    ("clock", "said"),
    [
        ((70.0, 53.0, 123.0, 71.0), "makes the call 1.73x as fast, 71.0 ms instead of 123 ms: 98%"),
        ((50.0, 53.0, 103.0, 112.0), "gains nothing here: both at once take 112 ms"),
        (
            (200.0, 4.0, 210.0, 190.0, 20.0),
            "Calls differ by up to 20.0 ms, more than overlap could",
        ),
        ((26.5, 44.8, 46.0, 31.6), "1.46x as fast, 31.6 ms instead of 46.0 ms."),
        ((6.0, 0.0, 6.0, 6.0), "no communication here, so there is nothing to overlap"),
    ],
)
def test_what_overlap_gains_is_a_sentence(clock: tuple[float, ...], said: str) -> None:
    assert said in report._gain(report.clock(*clock))


NAN, INFINITY = float("nan"), float("inf")
MOE = case_of("moe_dispatch_gemm")({}, "float16", "float16")


def compared(**errors: float) -> dict[str, Comparison]:
    return {name: Comparison(error, 10) for name, error in errors.items()}


def test_the_verdict_names_the_worst_output_and_rank() -> None:
    found = verify(
        MOE.tolerances(),
        [
            compared(outputs=2e-4, counts=0.0, out=3e-4),
            compared(outputs=1e-4, counts=0.0, out=4e-4),
        ],
    )
    assert found.passed
    assert (found.output, found.rank, found.error, found.tolerance) == ("out", 1, 4e-4, 5e-4)
    assert found.error_by_rank == (3e-4, 4e-4)
    assert (found.by_output["outputs"].rank, found.by_output["outputs"].error) == (0, 2e-4)


@pytest.mark.parametrize(
    ("name", "error"),
    [("counts", INFINITY), ("outputs", NAN), ("out", 6e-4), ("out", INFINITY)],
)
def test_one_wrong_output_of_one_rank_fails(name: str, error: float) -> None:
    right = compared(outputs=2e-4, counts=0.0, out=3e-4)
    found = verify(MOE.tolerances(), [right, {**right, **compared(**{name: error})}, right])
    assert not found.passed
    assert (found.output, found.rank) == (name, 1)


def test_ranks_without_elements_are_right_but_not_alone() -> None:
    """No token may go to a rank's experts; where no rank has any element, nothing was judged."""
    right = compared(outputs=2e-4, counts=0.0, out=3e-4)
    empty = {**right, "outputs": Comparison(0.0, 0)}
    found = verify(MOE.tolerances(), [right, empty])
    assert found.passed
    assert found.by_output["outputs"].elements == 10
    found = verify(MOE.tolerances(), [empty, empty])
    assert not found.passed
    assert found.output == "outputs"
    assert "nothing could be compared" in found.by_output["outputs"].why
    assert "outputs on rank 0 has no elements on any rank" in report._found(found)


def test_a_rank_of_few_elements_is_judged_by_its_own_limit_which_is_told() -> None:
    """And does not stand before a rank of many that is wrong with less."""
    few = {"out": Comparison(3.4e-3, 8, rounding=3.9e-3)}
    right, wrong = ({"out": Comparison(error, 999)} for error in (2e-3, 3.2e-3))
    found = verify({"out": 3e-3}, [right, few])
    assert found.passed
    assert (found.rank, found.error, found.tolerance) == (1, 3.4e-3, 3.9e-3)
    found = verify({"out": 3e-3}, [few, wrong])
    assert not found.passed
    assert (found.rank, found.error, found.tolerance) == (1, 3.2e-3, 3e-3)


def test_why_a_result_is_wrong_stays_with_the_rank_and_the_call_that_was() -> None:
    right = compared(outputs=2e-4, counts=0.0, out=3e-4)
    bad = {**right, "out": Comparison(INFINITY, 0, "has 3 of 10 elements that were never written")}
    calls = {name: right[name] + bad[name] + right[name] for name in right}
    found = verify(MOE.tolerances(), [right, calls])
    assert not found.passed
    assert report._found(found) == "out on rank 1 has 3 of 10 elements that were never written"


def measured(rank: int) -> dict[str, Turns]:
    last = {
        "compute_only": (2e-6, {"compute": 1e-6}),
        "sequential": (8e-6, {"compute": 1e-6 * (rank + 1), "comm": 3e-6}),
        "pipelined": (5e-6, {"compute": 1e-6, "comm": 4e-6}),
    }
    return {view: Turns([9.0, took], parts=[{}, parts]) for view, (took, parts) in last.items()}


def test_a_wall_timeline_is_called_wall(tmp_path: Path) -> None:
    drawn = timeline.wall([measured(0), measured(1)])
    timeline.write_trace(drawn, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert "modelled" not in text
    trace = json.loads(text)
    assert trace["otherData"]["clock"].startswith("wall, measured")
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"call", "comm", "compute"}
    sequential = {
        event["cat"]: event["dur"]
        for event in spans
        if event["pid"] == 1 and event["name"].startswith("sequential")
    }
    assert sequential == pytest.approx({"call": 8, "compute": 2, "comm": 3})
    ends = [event["ts"] + event["dur"] for event in spans]
    assert max(ends) == pytest.approx(drawn.total_us)


def test_a_modelled_timeline_is_called_modelled(tmp_path: Path) -> None:
    track = Track(0, "AIV 0", "comm", [Span("x", 0, 4)])
    pipe = Track(0, "AIV 0 MTE3", "comm", [Span("y", 0, 4, chunk=7)])
    run = ModelledRun("a machine", "pipelined", 4.0, (), (track,), (pipe,))
    timeline.write_trace(timeline.modelled([run]), tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert "modelled, a machine; not measured" in text
    events = json.loads(text)["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    drawn = {threads[e["tid"]]: (e["name"], e["args"]) for e in events if e["ph"] == "X"}
    assert drawn == {"AIV 0": ("x", {}), "AIV 0 MTE3": ("y", {"chunk": 7})}
    assert "wall" not in text
