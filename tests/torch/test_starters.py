"""Ranks that torchrun, torch.multiprocessing and Ray start. tests/frameworks has SLURM's srun."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mkernel.cases.base import TOLERANCE

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

SCRIPT = Path(__file__).with_name("started_rank.py")
LIMIT_S = 250


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a user who started nothing yet. Ranks find their modules where this process does."""
    told = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC_", "MKERNEL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    return {
        **kept,
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *filter(None, sys.path)]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "MKERNEL_TIMEOUT_S": "100",
    }


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def assert_ended(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        text, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, text


def notes(folder: Path, size: int = 2) -> list[dict[str, Any]]:
    """What the ranks left, in the order of ranks; their results were right."""
    found = [json.loads((folder / f"rank{rank}").read_text()) for rank in range(size)]
    assert [note["rank"] for note in found] == list(range(size))
    assert {note["size"] for note in found} == {size}
    assert len({note["name"] for note in found}) == 1
    for note in found:
        assert max(note["errors"]) <= TOLERANCE["float32"]
    return found


def test_torchrun(torchrun: list[str], tmp_path: Path, environment: dict[str, str]) -> None:
    """Without torch.distributed. Pages' programs begin with torch's group (tests/docs)."""
    command = [*torchrun, "--nproc-per-node", "2", str(SCRIPT), "alone", str(tmp_path)]
    assert_ended(start(command, environment))
    for note in notes(tmp_path):
        assert note["nodes"] == 1
        assert len(note["errors"]) == 2


def test_torch_multiprocessing(tmp_path: Path, environment: dict[str, str]) -> None:
    assert_ended(start([sys.executable, str(SCRIPT), "processes", str(tmp_path)], environment))
    for note in notes(tmp_path):
        assert len(note["errors"]) == 3


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs `pip install ray`")
def test_ray_actors(tmp_path: Path, environment: dict[str, str]) -> None:
    assert_ended(start([sys.executable, str(SCRIPT), "actors", str(tmp_path)], environment))
    for note in notes(tmp_path):
        assert len(note["errors"]) == 3
