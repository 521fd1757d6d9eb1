"""The benchmark of an expert layer's prefill, on a CPU: it runs, and sees what is wrong."""

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


def test_all_parts_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import prefill

    file = tmp_path / "prefill.json"
    given = (
        "prefill.py", "--accelerator", "streams", "--sizes", "tiny:40,tiny:1",
        "--dtype", "float32,float8_e4m3fn", "--turns", "2", "--json", str(file),
    )  # fmt: skip
    monkeypatch.setattr(sys, "argv", list(given))
    with patch.dict(os.environ):  # which it changes
        assert prefill.main() == 0
    rows = json.loads(file.read_text())["figures"]["rows"]
    assert [(row["dtype"], row["tokens"]) for row in rows] == [
        ("float32", 40), ("float32", 1), ("float8_e4m3fn", 40), ("float8_e4m3fn", 1),
    ]  # fmt: skip
    for row in rows:
        assert len(row["contenders"]) == (15 if row["dtype"] == "float8_e4m3fn" else 14)
        assert all(entry["median_us"] > 0 for entry in row["contenders"].values())
        assert sum(each["rows"] for each in row["routed"]) == row["tokens"] * 2 * 2
        for each in row["routed"]:
            assert each["multiplied"] % 64 == 0
            assert each["rows"] <= each["multiplied"] < each["rows"] + 64 * each["tiles"]
        assert {
            "routing",
            "exposed of up",
            "exposed of down",
            "tails",
            "halves",
            "layer of its floor",
        } <= set(row["parts"])


def test_a_floor_is_of_products_or_of_weights() -> None:
    """At 1 TFLOP/s and 1 GB/s."""
    import prefill

    us = {"dense": 2e-6 * 8**3, "copy": 16e-3 * 8**2, "up": 5e5, "dispatch": 30.0, "routed": 10.0,
          "up alone": 4e5}  # fmt: skip
    routed = [{"rows": 300, "experts": 3, "tiles": 4, "multiplied": 448, "halves": 3},
              {"rows": 500, "experts": 4, "tiles": 5, "multiplied": 576, "halves": 4}]  # fmt: skip
    row = {"width": "tiny", "dtype": "bfloat16", "routed": routed,
           "contenders": {name: {"median_us": each} for name, each in us.items()}}  # fmt: skip
    found = prefill.parts(row, 8)
    assert found["floor of up"] == pytest.approx(4 * 2 * 256 * 128 * 2 / 1e3)
    assert found["up of its floor"] == pytest.approx(5e5 / found["floor of up"])
    assert found["tails"] == pytest.approx(448 / 300 - 1)
    assert (found["halves"], found["routing"], found["exposed of up"]) == (0.8, 20.0, 1e5)
    assert "exposed of down" not in found
    row["contenders"]["copy"]["median_us"] /= 1e6
    found = prefill.parts(row, 8)
    assert found["floor of up"] == pytest.approx(2 * 500 * 2 * 256 * 128 / 1e6)


def test_products_of_other_experts_are_seen() -> None:
    import prefill_ranks

    for right, wrong in mkernel.launch(
        prefill_ranks.planted, ranks_per_node=2, accelerator="streams", timeout_s=DEADLINE_S
    ):
        assert right == []
        assert [each.split(" is")[0] for each in wrong] == ["up", "down", "down alone"]
