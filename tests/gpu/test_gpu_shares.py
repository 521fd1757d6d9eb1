"""How workers share GPUs, and which tests take more than a pair; neither needs one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_shares import share, visible

FOUR = ["4", "5", "6", "7"]


def test_workers_take_groups_by_turns() -> None:
    pairs = [share(f"gw{number}", FOUR, 2) for number in range(5)]
    assert pairs == [["4", "5"], ["6", "7"]] * 2 + [["4", "5"]]
    assert share("gw3", FOUR, 3) == ["4", "5", "6"]
    assert [share(f"gw{number}", FOUR, 1) for number in (0, 3, 4)] == [["4"], ["7"], ["4"]]


@pytest.mark.parametrize("each", [0, 5])
def test_a_group_that_is_not_there_is_refused(each: int) -> None:
    with pytest.raises(pytest.UsageError, match=f"--gpus-per-worker {each}: there are 4"):
        share("gw0", FOUR, each)


def test_those_that_are_told_of_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-8932f937")
    assert visible() == ["2", "GPU-8932f937"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible() == []


def test_nothing_asks_how_many_gpus_there_are_before_a_worker_has_its_share() -> None:
    """CUDA reads the variable once: the kit made worlds of four GPUs in a worker of two."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", "import conftest, sys; print('device_buffers' in sys.modules)"],
        capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.stdout.strip() == "False"


def test_what_takes_four_ranks_is_wide() -> None:
    """One to two ranks a GPU: four ranks take four GPUs, or two."""
    here = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-m",
        "wide",
        "-p",
        "no:cacheprovider",
    ]
    found = {}
    for shared in ("1", "2"):
        done = subprocess.run(
            [*command, str(here / "test_few_rows.py")], capture_output=True, text=True, timeout=300,
            check=False, cwd=here.parents[1],
            env={**os.environ, "MKERNEL_RANKS_PER_DEVICE": shared},
        )  # fmt: skip
        found[shared] = [line for line in done.stdout.splitlines() if "::" in line]
    assert found["1"]
    assert all("4" in line for line in found["1"])
    assert found["2"] == []
