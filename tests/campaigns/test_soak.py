"""Two short lives of the soak, and whether its rules catch what is planted; `make soak` goes on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from campaigns.flat import ALLOWED, LEAST, apart, growth, limits, piled_up, too_much
from campaigns.life import WARM, Lived
from campaigns.life_judge import Ended, judge
from campaigns.lives import Plan, Soaked, soak
from campaigns.many import BLOCKS, SLOWER, WARM_CALLS, Many, RankOutcome, drift, many
from campaigns.planted import GROWTH_BYTES, Planted
from campaigns.report import Report, merge
from campaigns.sample import Progress, Sample

CASES = 2


def sample(calls: int, **changes: object) -> Sample:
    """Of a rank that is as it was at its begin, but for the changes."""
    begin = Sample(
        calls,
        0.0,
        {"own": 100 << 20},
        Counter({"thread mkernel": 2}),
        {"all": Progress(*3 * (calls,))},
    )
    return begin._replace(**changes)  # type: ignore[arg-type]


# ---- in real worlds ------------------------------------------------------------------------------


def wrong_in(
    folder: Path, planted: Planted | None = None, accelerator: str = "streams"
) -> list[str]:
    """What is found in one life of two ranks that lasts for a few samples."""
    plan = Plan(
        3, accelerator, 0.0, ranks=2, step_calls=4, cases=CASES,
        planted=planted, planted_after=2 * CASES * WARM + 4,
    )  # fmt: skip
    return [each for _, wrong in soak(plan, folder, Soaked()) for each in wrong]


@pytest.mark.multiprocess
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("accelerator", [pytest.param("streams", marks=pytest.mark.long), "ascend"])
def test_a_killed_rank_is_replaced_and_the_next_life_is_right(
    accelerator: str, tmp_path: Path
) -> None:
    plan = Plan(1, accelerator, 600.0, life_s=2.0, lives=2, cases=CASES)
    lives = list(soak(plan, tmp_path, Soaked()))
    assert [ended.victim is not None for ended, _ in lives] == [True, False]
    assert [wrong for _, wrong in lives] == [[], []]


@pytest.mark.multiprocess
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("leak-a-call", "more of descriptor /memfd:mkernel-planted"),
        ("wrong-element", "rank 1"),
        ("lost-epoch", "calls of world"),
        ("growth", "rank 1: own memory grew"),
    ],
)
def test_what_is_planted_is_caught(planted: Planted, found: str, tmp_path: Path) -> None:
    """It begins with the fifth call of the last rank behind the warm-up, or is that one. A life has at
    least 32 of these, which are judged, and samples behind them. Memory grows by 2 MiB a call: from
    the least sample of the second third to that of the last there are three rounds of four calls.
    """
    assert 2 * ALLOWED["own"] < GROWTH_BYTES * 12
    assert any(found in each for each in wrong_in(tmp_path, planted))


# ---- of the rules --------------------------------------------------------------------------------


def test_a_descriptor_or_a_thread_more_is_no_longer_flat() -> None:
    assert piled_up([sample(0), sample(10), sample(20)]) == []
    more = sample(20, held=Counter({"thread mkernel": 3}))
    assert piled_up([sample(0), sample(10), more]) == [
        "1 more of thread mkernel after 20 calls than after 0"
    ]


def test_a_spike_is_no_growth_and_a_leak_is() -> None:
    flat = [100 << 20] * LEAST
    assert growth(flat) == 0
    assert growth([50 << 20, 80 << 20, 90 << 20, *flat[3:]]) == 0  # of what is made once
    for at in range(LEAST):
        spiked = [*flat]
        spiked[at] += 1 << 30
        assert growth(spiked) == 0
    leaks = [
        sample(100 * turn, memory={"own": (100 << 20) + turn * ALLOWED["own"] // 2})
        for turn in range(LEAST)
    ]
    assert len(too_much(leaks, ALLOWED)) == 1
    assert too_much(leaks[: LEAST - 1], ALLOWED) == []  # too few to say


def test_what_other_soaks_use_of_a_device_is_not_judged_and_own_memory_there_is() -> None:
    """The driver may count a process in some samples only."""

    def grows(kind: str) -> list[Sample]:
        flat = {
            "own": 1 << 30,
            "device": 1 << 30,
            "device_process": 1 << 30,
            "device_used": 1 << 30,
        }
        return [sample(n, memory={**flat, kind: (n << 24) + flat[kind]}) for n in range(LEAST)]

    for kind in ("own", "device", "device_process"):
        assert len(too_much(grows(kind), limits("hopper", 2))) == 1
    assert too_much(grows("device_used"), limits("hopper", 2)) == []
    assert len(too_much(grows("device_used"), limits("hopper"))) == 1
    once = grows("device_process")
    del once[4].memory["device_process"]
    assert too_much(once, limits("hopper")) == []


@pytest.mark.parametrize("which", ["number", "epoch", "counted"])
def test_a_count_that_differs_is_found_in_one_rank_and_between_two(which: str) -> None:
    right = [sample(0), sample(10)]
    made = right[1].worlds["all"]
    wrong = [right[0], sample(10, worlds={"all": made._replace(**{which: 9})})]
    assert apart({0: right, 1: right}) == []
    assert len(apart({0: right, 1: wrong})) == 1
    less = [right[0], sample(10, worlds={"all": Progress(9, 9, 9)})]
    assert len(apart({0: right, 1: less})) == 1


def killed(**changes: object) -> list[str]:
    told = ("PeerFailure", "rank 2 (process 7) died")
    lived = Lived(0, error=told, at=101.0, noticed={"all": told})
    for name, value in changes.items():
        setattr(lived, name, value)
    return judge(Ended(0, ALLOWED, 2, 100.0, {0: lived}, {2: "exit code -9"}))


def test_what_must_come_of_a_kill_is_accepted_and_anything_else_is_not() -> None:
    assert killed() == []
    assert "did not notice" in killed(error=None)[0]
    assert "only 400.0 s" in killed(at=500.0)[0]
    assert "names rank 2" in killed(noticed={"all": ("PeerFailure", "rank 1 died")})[0]
    assert "raised Timeout" in killed(noticed={"all": ("Timeout", "rank 2 is late")})[0]
    assert "before it had a world" in killed(noticed={})[0]
    assert "out is stale" in killed(wrong=["out is stale"])[0]
    assert "holds 1 more" in killed(left=["1 more of threads"])[0]


def test_runs_are_merged_in_one_step_or_two() -> None:
    def ran(**figures: object) -> dict[str, object]:
        return {"commit": "c", "hardware": {}, "software": {}, "figures": {"wrong": [], **figures}}

    one = ran(seed=1, calls_judged=5, calls_by_op_and_way={"x eager": 5})
    two = ran(seed=2, calls_judged=6, calls_by_op_and_way={"x eager": 6}, wrong=["out is stale"])
    many = ran(calls=100)
    whole = merge([one, two, many])
    figures = whole["figures"]
    assert figures["total"] == {"calls_judged": 11, "calls": 100}
    assert figures["calls_by_op_and_way"] == {"x eager": 11}
    assert figures["wrong"] == ["seed 2: out is stale"]
    assert [run.get("seed") for run in figures["runs"]] == [1, 2, None]
    assert merge([merge([one, two]), many]) == whole
    with pytest.raises(ValueError, match="different commit"):
        merge([one, {**two, "commit": "d"}])


def test_a_soak_that_was_stopped_before_its_end_is_wrong() -> None:
    report = Report(Plan(1, "streams", 480.0))
    report.add(Ended(0, ALLOWED), [])
    assert report.summary()["wrong"] == ["it did not come to its end"]
    report.end([])
    assert report.summary()["wrong"] == []


# ---- of many calls -------------------------------------------------------------------------------

EDGES = (1 << 32, 1 << 63)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("accelerator", ["streams", "ascend"])
@pytest.mark.parametrize("edge", EDGES)
def test_calls_go_over_an_edge_of_their_numbers(accelerator: str, edge: int) -> None:
    """Of the world, its epochs, its board and, on ascend, the words that only grow."""
    found = many(Many(accelerator, 2, 2 * BLOCKS, edge - WARM_CALLS - BLOCKS))
    assert [each.wrong for each in found.told] == [[], []]
    assert {each.samples[-1].worlds["all"].number for each in found.told} == {edge + BLOCKS}


@pytest.mark.multiprocess
@pytest.mark.usefixtures("leaves_nothing")
def test_one_wrong_result_of_many_is_caught() -> None:
    found = many(Many("streams", 1, 10 * BLOCKS, planted="wrong-once"))
    assert ["is off by" in each for each in found.told[0].wrong] == [True]


def test_calls_that_take_longer_with_time_are_found() -> None:
    assert drift([1.0, 1.0, 2.0] * 3, 3) == 1.0
    slower = [1.0 + turn / 30 for turn in range(BLOCKS)]  # twice as long at the end
    for on_gpu in (False, True):
        told = RankOutcome(cpu_s=[1.0] * BLOCKS, wall_s=[1.0] * BLOCKS, on_gpu=on_gpu)
        assert told.drift == 1.0
        (told.wall_s if on_gpu else told.cpu_s)[:] = slower
        assert told.drift > SLOWER


def test_replays_are_whole_rounds_that_the_host_does_not_count() -> None:
    assert Many("hopper", 2, 1_000_000, graph=True).each * BLOCKS == 1_000_320
    assert Many("hopper", 2, 1_000_000, graph=True).counted == WARM_CALLS + 16
    assert Many("hopper", 2, 1_000_000).counted == WARM_CALLS + 1_000_020
