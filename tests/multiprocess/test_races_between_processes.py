"""Ranks that are processes: their strict calls are walked together afterwards, and a wait for a peer
that one of them leaves out is reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mkernel
from mkernel.backends.accelerators.ascend import _ascend, races
from mkernel.conformance.accelerator import AcceleratorSubject
from mkernel.conformance.grid import typical
from mkernel.conformance.ranks import Judge

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS, CALLS = 3, 4
SUBJECT = AcceleratorSubject("ascend")


def calls(op: str, careless: bool) -> list[str]:
    """What was wrong with the results. ``careless``: rank 1's first cube core waits for nobody."""
    world = mkernel.world()
    if careless and world.rank == 1:
        wrong = _ascend.Strict(skip_role="cube", skip_waits=[*range(16)])
        world.accelerator._given_strict = wrong  # type: ignore[attr-defined]
    judge = Judge(typical(SUBJECT, op, RANKS))
    return [each for number in range(CALLS) for each in judge(number)]


def walked(
    op: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, careless: bool
) -> tuple[list[str], str]:
    monkeypatch.setenv("MKERNEL_ASCEND_STRICT", "1")
    monkeypatch.setenv("MKERNEL_ASCEND_RACES", str(folder))
    wrong = mkernel.launch(
        calls, op, careless, ranks_per_node=RANKS, accelerator="ascend", timeout_s=120
    )
    return [each for rank in wrong for each in rank], races.between(folder)


@pytest.mark.parametrize("op", sorted(SUBJECT.claimed_in((1, RANKS))))
def test_sound_calls_have_no_race(op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert walked(op, tmp_path, monkeypatch, careless=False) == ([], "")


def test_a_wait_for_a_peer_that_is_left_out_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_ASCEND_CUBE_CORES", "1")  # which has then tiles of all ranks
    _, found = walked("all_gather_gemm", tmp_path, monkeypatch, careless=True)
    assert re.match(r"rank 1 AIC core 0, TLOAD \(pipe MTE2, \w+\.hpp:\d+\): reads ", found), found
    assert re.search(
        r"which rank [02] AIV core \d+ writes in T\w+ \(pipe MTE3, \w+\.hpp:\d+\)", found
    )
    assert "no signal orders the two cores" in found


def test_logs_of_one_rank_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no logs of all ranks"):
        races.between(tmp_path)
    races.keep(tmp_path, 0, 1, b"no log")
    with pytest.raises(ValueError, match="ends early"):
        races.between(tmp_path)
    races.keep(tmp_path, 1, 2, b"no log")
    with pytest.raises(ValueError, match="logs of different calls"):
        races.between(tmp_path)
