"""The benchmark of what a call costs its host, where no device does anything: it runs, and it finds
the bars that figures miss."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed import HashStore

BENCH = Path(__file__).parents[2] / "bench"


def test_calls_that_do_nothing_are_timed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import host_time

    given = "--accelerator nothing --ranks 1 --calls 5 --repeats 2 --shapes 10 --pauses 1"
    monkeypatch.setattr(sys, "argv", ["host_time.py", *given.split()])
    with patch.dict(os.environ):  # which it changes
        host_time.main()
    said = capfd.readouterr().out
    assert "fused, 1 ranks" in said
    lines = dict(line.strip().rsplit(maxsplit=1) for line in said.splitlines()[1:-1])
    for op in ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"):
        for where in ("", ", dim 1 of 1,", ", dim 1 of 4,"):
            for mode in ("known", "step", "compiled"):
                assert float(lines[f"{op}{where} {mode}"]) > 0
        assert float(lines[f"{op} new rows, 99 %"]) >= float(lines[f"{op} new rows"])
    for name in ("all_gather_gemm", "gemm_all_reduce", "all_reduce", "mm", "mm, all_reduce"):
        assert 0 < float(lines[f"{name} after a pause"]) < 0.7e6  # of the call alone
    assert abs(float(lines["objects left"])) < 100  # 10,000 calls are started without Python


def test_bars_are_above_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import host_time

    op = "gemm_all_reduce"
    found = {f"{op} mm": 10.0, f"{op} known": 14.4, f"{op} commands": 2.0, f"{op} mm step": 50.0,
             f"{op} step": 99.0, f"{op} mm compiled": 20.0, f"{op} compiled": 27.0,
             f"{op} new rows": 149.0, f"{op} new rows, 99 %": 499.0, "mm after a pause": 30.0,
             f"{op} after a pause": 89.0}  # fmt: skip
    assert host_time.bars(found, new=True) == []
    one = host_time.bars({**found, f"{op} commands": 1.0}, new=True)
    assert one == [f"{op} known: 14.4 us, bar 12.0"]
    slow = {name: us if "mm" in name.split() else 2 * us for name, us in found.items()}
    assert len(host_time.bars(slow, new=True)) == 6
    paused = {**found, "all_reduce after a pause": 90.1}
    assert host_time.bars(paused, new=True) == ["all_reduce after a pause: 90.1 us, bar 90.0"]
    for name in ("mm", "known"):
        assert len(host_time.bars({**found, f"{op} {name}": math.nan}, new=True)) == 1


def test_a_group_does_not_find_the_addresses_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import torch_group

    stores: list[Any] = []
    world = SimpleNamespace(group_store=HashStore(), rank=0, size=2)
    monkeypatch.setattr(torch_group.mkernel, "world", lambda: world)
    given = {"init_process_group": lambda *_, store, **__: stores.append(store),
             "destroy_process_group": lambda: stores[-1].set("address", "gone")}  # fmt: skip
    for name, each in given.items():
        monkeypatch.setattr(torch_group.distributed, name, each)
    for _ in range(2):
        with torch_group.default_group(cuda=False):
            assert not stores[-1].check(["address"])
