"""Times and errors of ranks become the figures of a row by the formulae of the results' docstrings."""

from __future__ import annotations

import pytest

from mkernel.cases import Comparison
from mkernel.harness import bench_report, figures
from mkernel.harness.problem import Kind
from mkernel.harness.results import Row
from mkernel.harness.spec import Shape
from mkernel.harness.turns import Turns

KINDS: dict[str, Kind] = {
    "mkernel": "op",
    "nccl+cublas": "op",
    "symm_mem": "op",
    "gemm": "compute",
    "comm": "communication",
    "copy": "bytes",
}
SHAPE = Shape(
    op="all_gather_gemm", m=1000, n=1000, k=500, target=1.5, target_ranks=2,
    target_accelerator="hopper",
)  # fmt: skip


def turns(*microseconds: float, error: float = 1e-3, limit: float = 3e-3) -> Turns:
    return Turns(
        [each * 1e-6 for each in microseconds], {"out": Comparison(error, 1)}, {"out": limit}
    )


def row(world: int = 2, shape: Shape = SHAPE, **others: Turns) -> Row:
    first = {
        "mkernel": turns(140, 100, 150),
        "nccl+cublas": turns(250, 250, 250),
        "symm_mem": turns(200, 200, 200),
        "gemm": turns(100, 100, 100),
        "comm": turns(80, 80, 80),
        "copy": turns(50, 50, 50),
    }
    second = {**first, "mkernel": turns(120, 130, 120), **others}
    return figures.row(shape, KINDS, [first, second], world, "hopper")


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    found = row().entries["mkernel"].figures
    assert found is not None
    assert found.median_us == pytest.approx(140)  # of 140, 130, 150
    assert found.p10_us == pytest.approx(132)
    assert found.p90_us == pytest.approx(148)


def test_bytes_by_a_rails_rate_count_where_nothing_is_timed_for_them() -> None:
    absent = Turns(absent="would go past the NIC")
    others = dict.fromkeys(("nccl+cublas", "symm_mem", "comm", "copy"), absent)
    ranks = [{"mkernel": turns(100), "gemm": turns(100), **others} for _ in range(2)]
    made = figures.row(SHAPE, KINDS, ranks, 2, "hopper", wire_us=70.0)
    assert (made.comm_us, made.floor_us) == (70.0, pytest.approx(100))
    timed = figures.row(SHAPE, KINDS, [{**rank, "comm": turns(80)} for rank in ranks], 2, "hopper",
                        wire_us=70.0)  # fmt: skip
    assert timed.comm_us == pytest.approx(80)


def test_ratios() -> None:
    made = row()
    found = made.entries["mkernel"].figures
    assert found is not None
    assert (made.compute_us, made.comm_us) == (pytest.approx(100), pytest.approx(50))
    assert made.floor_us == pytest.approx(100)
    assert found.rho == pytest.approx(100 / 140)
    assert found.eta == pytest.approx((100 + 50 - 140) / 50)
    assert found.speedup == pytest.approx(250 / 140)
    assert found.to_gemm == pytest.approx(1.4)
    assert found.tflops == pytest.approx(1e9 / 140e-6 / 1e12)
    assert (made.best_peer, made.to_best) == ("symm_mem", pytest.approx(0.7))
    alone = made.entries["gemm"].figures
    assert alone is not None
    assert alone.rho is None
    assert alone.tflops == pytest.approx(10)


@pytest.mark.parametrize(
    ("target", "world", "verdict"), [(1.5, 2, True), (1.3, 2, False), (1.5, 4, None)]
)
def test_a_target_counts_in_the_world_it_is_meant_for(
    target: float, world: int, verdict: bool | None
) -> None:
    shape = SHAPE.model_copy(update={"target": target})
    assert row(world, shape).meets_target is verdict
    elsewhere = shape.model_copy(update={"target_accelerator": "streams"})
    assert row(world, elsewhere).meets_target is None


@pytest.mark.parametrize(("share", "verdict"), [(1.01, True), (0.99, False)])
def test_a_target_in_microseconds(share: float, verdict: bool) -> None:
    mine = row(2, SHAPE).entries["mkernel"].figures
    assert mine is not None
    shape = SHAPE.model_copy(update={"target": None, "target_us": share * mine.median_us})
    assert row(2, shape).meets_target is verdict
    assert row(4, shape).meets_target is None


@pytest.mark.parametrize("error", [4e-3, float("inf"), float("nan")])
def test_one_wrong_rank_leaves_no_figure(error: float) -> None:
    made = row(symm_mem=turns(1, 1, 1, error=error))
    entry = made.entries["symm_mem"]
    assert entry.state == "wrong"
    assert entry.figures is None
    assert made.wrong == ["symm_mem"]
    assert made.best_peer == "nccl+cublas"  # the fast wrong one does not count


def test_wrong_parts_give_no_floor() -> None:
    made = row(gemm=turns(1, 1, 1, error=1.0))
    assert made.floor_us is None
    assert made.entries["mkernel"].figures is not None
    assert made.entries["mkernel"].figures.rho is None


def test_absent_is_not_wrong() -> None:
    made = row(symm_mem=Turns(absent="only on cuda devices"))
    assert made.entries["symm_mem"].state == "absent"
    assert made.wrong == []


def test_the_way_of_a_call_stands_beside_its_size() -> None:
    mine = {name: turns(100) for name in KINDS}
    mine["mkernel"].way = "hopper.ring_attention"
    made = figures.row(SHAPE, KINDS, [mine, mine], 2, "hopper")
    assert made.entries["mkernel"].way == "hopper.ring_attention"
    assert bench_report.size(made) == f"{SHAPE.size}, hopper.ring_attention"
    assert bench_report.size(row()) == SHAPE.size


def started(*starts_ns: int, error: float = 1e-3) -> Turns:
    return Turns(
        [100e-6 * (i + 1) for i in range(len(starts_ns))],
        {"out": Comparison(error, 1)},
        {"out": 3e-3},
        starts_ns=list(starts_ns),
    )


def together(most_skew_us: float | None, *late_ns: int) -> Row:
    """Three turns; the second rank started so much later in each."""
    first = started(*(1000 for _ in late_ns))
    second = started(*(1000 + late for late in late_ns))
    kinds: dict[str, Kind] = {"mkernel": "op"}
    ranks = [{"mkernel": each} for each in (first, second)]
    return figures.row(SHAPE, kinds, ranks, 2, "hopper", most_skew_us=most_skew_us)


def test_turns_that_started_late_are_dropped_and_counted() -> None:
    made = together(10.0, 2_000, 10_001, 10_000)
    entry = made.entries["mkernel"]
    assert entry.skew_us == (2.0, 10.001, 10.0)
    assert entry.dropped == 1
    assert [turn[0] for turn in entry.seconds] == [pytest.approx(100e-6), pytest.approx(300e-6)]
    assert entry.figures is not None
    assert entry.figures.median_us == pytest.approx(200)
    timing = figures.timing({"clock": "events", "launches": "hidden", "start": "instant"}, [made])
    assert (timing.median_skew_us, timing.turns, timing.dropped) == (10.0, 3, 1)


def test_no_turn_is_dropped_where_hosts_promise_nothing() -> None:
    entry = together(None, 2_000, 900_000, 10_000).entries["mkernel"]
    assert entry.dropped == 0
    assert len(entry.seconds) == 3


def test_a_contender_whose_turns_all_started_late_has_no_figure() -> None:
    made = together(10.0, 11_000, 12_000, 13_000)
    entry = made.entries["mkernel"]
    assert (entry.state, entry.dropped, entry.figures) == ("failed", 3, None)
    assert "within 10.0 us of each other" in entry.why
    assert made.wrong == ["mkernel"]


def test_without_a_clock_skew_is_not_made_up() -> None:
    made = row()
    assert made.entries["mkernel"].skew_us == ()
    timing = figures.timing({"clock": "events", "launches": "hidden", "start": "barrier"}, [made])
    assert timing.median_skew_us is None
    assert timing.dropped == 0
