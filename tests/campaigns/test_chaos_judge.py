"""The judge can fail: what it is there to find is planted, and found."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from campaigns.draw import SHORT_TIMEOUT_S, TIMEOUT_S, Turn, draw
from campaigns.faults import Fault, WorldKind
from campaigns.pool import Pool, Scene
from campaigns.rank import RankOutcome
from campaigns.turn_judge import SLACK_S, Outcome, judge
from campaigns.turns import play

from mkernel.conformance.accelerator import AcceleratorSubject
from mkernel.conformance.grid import typical

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def turn(kind: str, *victims: int, stage: str = "calls") -> Turn:
    drawn = draw(0, 0, "none")
    fault = Fault(kind, victims, stage)  # type: ignore[arg-type]
    return replace(drawn, world=WorldKind(1, 3, "streams"), nic="", environment={}, fault=fault)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(tmp_path)
    yield made
    made.close()


# ---- in real worlds ------------------------------------------------------------------------------


def test_a_wrong_element_is_caught(pool: Pool) -> None:
    case = typical(AcceleratorSubject("streams"), "gemm_all_reduce", 3)
    healthy = replace(turn("none"), cases=(case,))
    assert play(pool, healthy).wrong == []
    (found,) = {text.partition(": out ")[2] for text in play(pool, healthy, "wrong-element").wrong}
    assert "elements that are wrong" in found or "off by" in found


def test_a_wrong_element_of_a_group_is_caught(pool: Pool) -> None:
    case = typical(AcceleratorSubject("streams"), "gemm_all_reduce", 2)
    healthy = replace(turn("none"), group=(0, 2), group_cases=(case,))
    assert play(pool, healthy).wrong == []
    found = play(pool, healthy, "wrong-in-group").wrong
    assert found
    assert all(text.startswith("in the group: gemm_all_reduce ") for text in found)


def test_a_wrong_element_of_a_group_over_several_nodes_is_caught(pool: Pool) -> None:
    case = typical(AcceleratorSubject("ascend"), "gemm_all_reduce", 2)
    two_nodes = draw(1, 5)
    assert (two_nodes.world.nodes, two_nodes.nic, two_nodes.fault.kind) == (2, "cx7", "none")
    healthy = replace(two_nodes, group=(0, 1), group_nodes=2, group_cases=(case,))
    assert play(pool, healthy).wrong == []
    found = play(pool, healthy, "wrong-in-group").wrong
    assert found
    assert all(text.startswith("in the group: gemm_all_reduce ") for text in found)


def test_a_leak_is_caught(pool: Pool) -> None:
    healthy = turn("none")
    assert play(pool, healthy).wrong == []  # what is made once is no leak
    found = play(pool, healthy, "leak").wrong
    assert found == ["rank 2 holds 1 more of descriptor /memfd:mkernel-planted (deleted)"]


def test_a_silent_rank_is_caught_and_says_where_it_is(pool: Pool) -> None:
    short = replace(turn("none"), timeout_s=1.0)
    result = play(pool, short, "silence", beyond_s=20.0)
    assert 2 in result.outcome.silent
    assert "misbehave" in result.outcome.silent[2]
    assert any(text.startswith("rank 2 says nothing") for text in result.wrong)
    assert play(pool, turn("none")).wrong == []


def test_a_rank_that_is_stopped_as_its_part_ends_takes_the_next_one(pool: Pool) -> None:
    late = turn("stopped-briefly", 1)
    scene = Scene(pool, replace(late, fault=replace(late.fault, delay_s=1e9, amount=1.0)))
    scene.play()
    scene._strike()
    scene.close()
    short = replace(turn("none"), timeout_s=1.0)
    assert play(pool, short, beyond_s=20.0).wrong == []


def test_a_rank_that_is_killed_as_its_part_ends_takes_no_other_one(pool: Pool) -> None:
    late = turn("killed", 1, stage="leave")
    scene = Scene(pool, replace(late, fault=replace(late.fault, delay_s=1e9)))
    scene.play()
    assert 1 in scene.outcome.told
    scene._strike()
    scene.close()
    assert play(pool, turn("none")).wrong == []


def test_a_rank_that_goes_on_writing_is_caught(pool: Pool) -> None:
    stopped = replace(turn("stopped-for-long", 2), timeout_s=SHORT_TIMEOUT_S)
    assert play(pool, stopped).wrong == []
    (found,) = play(pool, stopped, "late-write").wrong
    assert re.fullmatch(
        r"4 bytes of process \d+, whose world has ended, were written, the first at 4096 of \d+",
        found,
    )


# ---- of outcomes that are made up ----------------------------------------------------------------

LATE = 101.0 + TIMEOUT_S + SLACK_S
KILLED = {
    rank: RankOutcome(rank, error=("PeerFailure", "rank 2 died"), at=101.0) for rank in (0, 1)
}


def outcome(**told: RankOutcome) -> Outcome:
    """Rank 2 was killed at 100 s; what the others told, where not the right thing."""
    changed = {int(name[1:]): each for name, each in told.items()}
    return Outcome({**KILLED, **changed}, {2: "exit code -9"}, struck_at=100.0)


def test_what_must_come_of_a_killed_rank_is_accepted() -> None:
    assert judge(turn("killed", 2), outcome()) == []


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (RankOutcome(1, error=("Timeout", "rank 2 died"), at=101.0), "raised Timeout instead of"),
        (RankOutcome(1, error=("PeerFailure", "rank 2 left"), at=101.0), "say different things"),
        (RankOutcome(1), "noticed nothing"),
        (RankOutcome(1, error=("PeerFailure", "rank 0 died"), at=101.0), "names none of ranks"),
        (RankOutcome(1, error=KILLED[1].error, at=LATE), "s after it"),
        (RankOutcome(1, error=KILLED[1].error, at=101.0, wrong=["out is stale"]), "out is stale"),
        (
            RankOutcome(1, error=KILLED[1].error, at=101.0, left=["1 more of threads"]),
            "holds 1 more",
        ),
    ],
)
def test_anything_else_is_not(told: RankOutcome, found: str) -> None:
    assert any(found in text for text in judge(turn("killed", 2), outcome(_1=told)))


def test_a_process_that_dies_of_itself_is_not() -> None:
    assert "rank 1 died" in judge(turn("raises", 0), Outcome({}, {1: "exit code -11"}))[0]


def test_an_error_without_a_fault_is_not() -> None:
    told = {0: RankOutcome(0, error=("Timeout", "it is slow"))}
    assert "raised Timeout instead of nothing" in judge(turn("none"), Outcome(told))[0]


def test_a_group_whose_world_ends_without_a_fault_is_not() -> None:
    told = {0: RankOutcome(0), 1: RankOutcome(1, group_error=("Timeout", "it is slow"))}
    (found,) = judge(turn("none"), Outcome(told))
    assert found == "in the group: rank 1 raised Timeout instead of nothing: it is slow"


def test_ranks_need_not_agree_about_one_that_ends_as_the_world_does() -> None:
    assert judge(turn("killed", 2, stage="leave"), outcome(_1=RankOutcome(1))) == []


def test_nor_about_one_that_is_killed_so_late_that_the_world_was_ending() -> None:
    told = {rank: RankOutcome(rank) for rank in (0, 1)}
    joining = turn("killed-joining", 2, stage="join")
    died = {2: "exit code -9"}
    assert judge(joining, Outcome(told, died, leaving={0, 1, 2})) == []
    assert "noticed nothing" in judge(joining, Outcome(told, died, leaving={0, 1}))[0]


def test_nor_about_one_that_fails_in_a_group_when_all_calls_of_the_world_are_made() -> None:
    limited = turn("files-exhausted", 2)
    for calls, found in ((limited.calls - 1, ["rank 1 noticed nothing"]), (limited.calls, [])):
        victim = RankOutcome(2, calls, error=("OSError", "too many open files"), at=100.0)
        others = {
            0: RankOutcome(0, error=("PeerFailure", "rank 2 failed"), at=101.0),
            1: RankOutcome(1),
        }
        assert judge(limited, Outcome({**others, 2: victim})) == found


def test_a_limit_that_is_not_hit_is_no_fault() -> None:
    limited = turn("files-exhausted", 0)
    assert judge(limited, Outcome({rank: RankOutcome(rank) for rank in range(3)})) == []
    victim = RankOutcome(0, error=("OSError", "too many open files"))
    told = {0: victim, 1: RankOutcome(1), 2: RankOutcome(2)}
    assert "noticed nothing" in judge(limited, Outcome(told))[0]
