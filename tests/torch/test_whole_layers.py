"""The benchmark of whole layers, on a CPU: it runs, and does not time what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from in_world import DEADLINE_S

import mkernel

BENCH = Path(__file__).parents[2] / "bench"


def test_layers_of_all_ways_are_right() -> None:
    done = subprocess.run(
        [sys.executable, BENCH / "whole_layers.py", "--accelerator", "streams", "--hidden", "64",
         "--tokens", "16,128", "--modes", "eager", "--turns", "1"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "tokens" in line]
    assert len(lines) == 6  # two layers; forward at 16 tokens, both directions at 128
    assert all("library" in line and "mkernel" in line and "wrong" not in line for line in lines)


def test_a_wrong_contender_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PYTHONPATH", f"{BENCH}:{Path(__file__).parent}")
    import whole_layers_ranks

    for found in mkernel.launch(
        whole_layers_ranks.turns, ranks_per_node=2, accelerator="streams", timeout_s=DEADLINE_S
    ):
        assert isinstance(found["library"], float)
        assert isinstance(found["mkernel"], float)
        assert "relative error" in str(found["keeps its part"])
        assert "gradient of x" in str(found["forgets a gradient"])
