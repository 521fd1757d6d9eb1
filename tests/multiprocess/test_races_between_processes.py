"""Ranks that are processes: their strict calls are walked together afterwards, and a wait for a peer
that one of them leaves out is reported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import mkernel
from mkernel.backends.accelerators.ascend import _ascend, races
from mkernel.backends.contracts.accelerator import Call, Launch
from mkernel.conformance.accelerator import AcceleratorSubject
from mkernel.conformance.grid import typical
from mkernel.conformance.ranks import Judge

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS, CALLS = 3, 4
SUBJECT = AcceleratorSubject("ascend")


class Careless(NamedTuple):
    """A core of rank 1 that leaves out a wait, by its number among the core's."""

    role: str
    core: int
    wait: int


CARELESS = {
    "all_gather_gemm": Careless("cube", 0, 0),  # for a chunk of a peer
    "gemm_reduce_scatter": Careless("comm", 4, 1),  # for a peer's partial sums
    "gemm_all_reduce": Careless("comm", 2, 0),  # for the sums of their owner
    "moe_dispatch_gemm": Careless("vector", 5, 2),  # for rows of a peer
    "moe_combine": Careless("vector", 1, 0),  # for results of a peer
    "ring_attention": Careless("cube", 0, 1),  # for keys of a peer
}


def calls(op: str, careless: Careless | None) -> list[str]:
    """What was wrong with the results."""
    world = mkernel.world()
    if careless and world.rank == 1:
        wrong = _ascend.Strict(
            skip_role=careless.role, skip_core=careless.core, skip_waits=[careless.wait]
        )
        _strict_for(op, wrong)
    judge = Judge(typical(SUBJECT, op, RANKS))
    return [each for number in range(CALLS) for each in judge(number)]


def _strict_for(op: str, wrong: _ascend.Strict) -> None:
    """Plant it in this rank's calls of ``op`` alone: a dispatch comes ahead of each combine."""
    accelerator: Any = mkernel.world().accelerator
    sound, launch = accelerator._strict, accelerator.launch

    def launched(call: Call) -> Launch:
        accelerator._strict = wrong if call.plan.op == op else sound
        return launch(call)

    accelerator.launch = launched


def walked(
    op: str, folder: Path, monkeypatch: pytest.MonkeyPatch, careless: Careless | None = None
) -> tuple[list[str], str]:
    monkeypatch.setenv("MKERNEL_ASCEND_STRICT", "1")
    monkeypatch.setenv("MKERNEL_ASCEND_RACES", str(folder))
    wrong = mkernel.launch(
        calls, op, careless, ranks_per_node=RANKS, accelerator="ascend", timeout_s=120
    )
    return [each for rank in wrong for each in rank], races.between(folder)


@pytest.mark.parametrize("op", sorted(SUBJECT.claimed_in((1, RANKS))))
def test_sound_calls_have_no_race(op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert walked(op, tmp_path, monkeypatch) == ([], "")


@pytest.mark.parametrize("op", CARELESS)
def test_a_wait_for_a_peer_that_is_left_out_is_found(
    op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two cores came first; the results may be right all the same."""
    monkeypatch.setenv("MKERNEL_ASCEND_CUBE_CORES", "1")  # which has then tiles of all ranks
    _, found = walked(op, tmp_path, monkeypatch, CARELESS[op])
    told = re.fullmatch(
        r"rank (\d) AI[CV] core \d+.*, T\w+ \(pipe \w+, \w+\.hpp:\d+\): (?:reads|overwrites) .* part "
        r"of which rank (\d) AI[CV] core \d+.* (?:reads|writes) in T\w+ \(pipe \w+, \w+\.hpp:\d+\): no "
        r"signal orders the two cores; a TNOTIFY or a TWAIT is missing",
        found,
    )
    assert told, found
    assert "1" in told.groups()
    assert set(told.groups()) & {"0", "2"}


def test_logs_of_one_rank_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no logs of all ranks"):
        races.between(tmp_path)
    races.keep(tmp_path, 0, 1, b"no log")
    with pytest.raises(ValueError, match="ends early"):
        races.between(tmp_path)
    races.keep(tmp_path, 1, 2, b"no log")
    with pytest.raises(ValueError, match="logs of different calls"):
        races.between(tmp_path)
