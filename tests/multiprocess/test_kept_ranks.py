"""Rank processes that are kept over calls: a world of its own for each; failed ones are replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import kept_ranks
import pytest
from in_world import gathers

import mkernel
from mkernel.errors import PeerFailure

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    kept_ranks.close()
    yield
    kept_ranks.close()


def run(fn: Any, *args: Any, ranks: int = 2) -> list[Any]:
    return kept_ranks.run(fn, *args, ranks_per_node=ranks, accelerator="streams")


def who(name: str = "") -> tuple[int, int, int, str | None]:
    """(process, rank, calls of its world before, a variable)."""
    world = mkernel.world()
    before = world._failure.call[0]
    assert gathers(3) < 1e-5
    return os.getpid(), world.rank, before, os.environ.get(name)


def length(text: str) -> int:
    return len(text)


def sets(name: str) -> str | None:
    """What it was before."""
    before = os.environ.get(name)
    os.environ[name] = "1"
    return before


def fails(rank: int) -> None:
    if mkernel.world().rank == rank:
        raise LookupError("planned")
    mkernel.world().barrier()


def dies(rank: int) -> None:
    if mkernel.world().rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    mkernel.world().barrier()


def test_calls_share_processes_and_no_world() -> None:
    first, again = run(who), run(who)
    assert (
        [each[1:] for each in first] == [each[1:] for each in again] == [(0, 0, None), (1, 0, None)]
    )
    assert [each[0] for each in first] == [each[0] for each in again]
    assert kept_ranks.processes() == {each[0] for each in first}


def test_large_arguments_come_through() -> None:
    assert run(length, "x" * (40 << 20)) == [40 << 20] * 2


def test_new_ones_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept_ranks.FRESH, "1")
    assert {each[0] for each in run(who)}.isdisjoint(each[0] for each in run(who))
    assert not kept_ranks.processes()


def test_a_call_leaves_no_variables() -> None:
    assert run(sets, "SET_BY_A_CALL") == [None] * 2
    assert run(sets, "SET_BY_A_CALL") == [None] * 2


def test_other_settings_and_sizes_have_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {each[0] for each in run(who)}
    assert usual.isdisjoint(each[0] for each in run(who, ranks=1))
    monkeypatch.setenv("MKERNEL_PATH", "fused")
    other = run(who, "MKERNEL_PATH")
    assert [each[3] for each in other] == ["fused"] * 2
    assert usual.isdisjoint(each[0] for each in other)
    monkeypatch.delenv("MKERNEL_PATH")
    assert {each[0] for each in run(who)} == usual
    for number in range(kept_ranks.MOST_KINDS):
        monkeypatch.setenv("MKERNEL_TIMEOUT_S", str(100 + number))
        run(who)
    assert len(kept_ranks.processes()) == 2 * kept_ranks.MOST_KINDS
    assert usual.isdisjoint(kept_ranks.processes())


@pytest.mark.parametrize(("what", "error"), [(fails, LookupError), (dies, PeerFailure)])
@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_failure_there_are_others(what: Any, error: type[Exception], rank: int) -> None:
    usual = {each[0] for each in run(who)}
    with pytest.raises(error, match="planned" if what is fails else f"rank {rank}"):
        run(what, rank)
    assert not kept_ranks.processes()
    assert usual.isdisjoint(each[0] for each in run(who))
