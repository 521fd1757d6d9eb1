"""What benchmarks share that time whole things in turns, on a CPU, and two that have no tests else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from in_world import DEADLINE_S

import mkernel

pytestmark = pytest.mark.usefixtures("bench_scripts")


ENDINGS = ["nccl", "mkernel", "prefetch", "none"]


@pytest.mark.parametrize(
    ("script", "options", "contenders"),
    [("decode", ["--sizes", "tiny:4"], ENDINGS),
     ("decode", ["--sizes", "tiny:4", "--dtype", "float8_e4m3fn"], ENDINGS),
     ("moe_training", ["--sizes", "tiny:64"], ["mkernel", "recomputed", "all-to-all", "gather"])],
    ids=["decode", "decode in e4m3", "moe_training"],
)  # fmt: skip
def test_all_contenders_are_right_and_timed(
    script: str,
    options: list[str],
    contenders: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "found.json"
    given = ("--accelerator", "streams", *options, "--turns", "2", "--json", str(file))
    monkeypatch.setattr(sys, "argv", [script, *given])
    with patch.dict(os.environ):  # which it changes
        assert __import__(script).main() == 0
    content = json.loads(file.read_text())
    assert content["benchmark"] == script
    (row,) = content["figures"]["rows"]
    assert [*row["contenders"]] == contenders
    for entry in row["contenders"].values():
        assert (entry["turns"], entry["dropped"]) == (2, 0)
        assert entry["median_us"] > 0


def test_what_fails_on_one_rank_takes_part_on_none() -> None:
    import turns_ranks

    for found in mkernel.launch(
        turns_ranks.planted, ranks_per_node=2, accelerator="streams", timeout_s=DEADLINE_S
    ):
        assert found["wrong"] == {"failed": "wrong: result"}
        assert found["breaks"] == {"failed": "ValueError: first line"}
        assert (found["runs"]["error"], found["runs"]["parts"]) == (1.0, {"x": 1.0})
        assert found["runs"]["turns"] == 3


def test_a_run_fails_where_rows_are_missing_or_miss_a_bar() -> None:
    import turns

    assert turns.exit_code([{"missed": []}], 1) == 0
    assert turns.exit_code([{"missed": []}], 2) == 1
    assert turns.exit_code([{"missed": []}, {"missed": ["late"]}], 2) == 1
