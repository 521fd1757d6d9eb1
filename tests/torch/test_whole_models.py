"""The benchmark of whole models, on a CPU: it runs, times nothing that is wrong, and misses no bar that
is missed."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from in_world import DEADLINE_S
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

import mkernel
from mkernel.harness import gains

pytestmark = pytest.mark.usefixtures("bench_scripts")


def test_models_of_all_forms_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import whole_models

    file = tmp_path / "whole_models.json"
    given = (
        "whole_models.py", "--accelerator", "streams", "--layers", "1",
        "--sizes", "tiny:128x2", "--models", "torch,nn,floor", "--modes", "eager,compiled",
        "--backend", "aot_eager", "--turns", "2", "--json", str(file),
    )  # fmt: skip
    monkeypatch.setattr(sys, "argv", list(given))
    with patch.dict(os.environ):  # which it changes
        assert whole_models.main() == 0
    rows = json.loads(file.read_text())["figures"]["rows"]
    assert [row["measure"] for row in rows] == ["prefill", "step"]
    for row in rows:
        assert len(row["contenders"]) == 6
        assert all(entry["median_us"] > 0 for entry in row["contenders"].values())
        judged = {line["contender"]: line for line in row["judged"]}
        assert judged.keys() == {"nn eager", "nn compiled"}
        assert all("recovered" in line and "ceiling" in line for line in judged.values())
    modes = {each.mode: each for each in gains.all_series(tmp_path)}
    assert modes["step, compiled, nn"].peers == {"torch": 1}


def test_a_contender_that_cheats_is_found_out() -> None:
    import whole_models_ranks

    for found in mkernel.launch(
        whole_models_ranks.planted, ranks_per_node=2, accelerator="streams", timeout_s=DEADLINE_S
    ):
        assert found["communicates nothing"]["failed"].startswith("wrong: result")
        assert found["forgets a gradient"]["failed"].startswith("wrong: gradient of x")
        assert found["remembers"]["failed"].startswith("wrong: result")
        assert "0 x gemm_reduce_scatter, 4 to 4 wanted" in found["falls back"]["calls_wrong"]
        for right in ("nothing", "decoder"):
            assert found[right]["calls_wrong"] == ""
            assert found[right]["us"]
        assert found["decoder"]["calls"] == {"gemm_all_reduce": 2}


def test_the_floor_multiplies_as_much_where_it_is_compiled() -> None:
    """No product of the backward pass moves into the forward one, and none goes."""
    import llama

    width = llama.WIDTHS["tiny"]
    block = llama.FloorBlock(width, 2, llama._norms(width))
    block.whole = torch.randn(2, 64, width.hidden)
    found = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graph.graph.eliminate_dead_code()
        found.append(Counter(str(node.target) for node in graph.graph.nodes)["aten.mm.default"])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    x = torch.randn(2, 32, width.hidden, requires_grad=True)
    y, others = llama.stack([compiled])(x, llama.rotary(width, 64, x))
    driven = [each for each in others if each.requires_grad]
    assert len(driven) == 2
    gradients = [torch.randn_like(each) for each in (y, *driven)]
    torch.autograd.grad((y, *driven), [x, *block.parameters()], gradients)
    assert found == [4, 8]


def entry(us: float, **others: Any) -> dict[str, Any]:
    return {"us": [us, us], "median_us": us, "calls_wrong": "", **others}


def missed(torch_us: float, mine_us: float, floor_us: float, **row: Any) -> list[str]:
    """The bars that a compiled `nn` misses, whose time is the same in all modes."""
    import whole_models

    times = (("torch", torch_us), ("nn", mine_us), ("floor", floor_us))
    modes = row.pop("modes", ("compiled", "graph"))
    given = {
        "measure": "step", "tokens": 8192, "cuda": True,
        "above_products_us": {"mkernel": 0.0, "library": 0.0},
        "contenders": {f"{name} {mode}": entry(us) for name, us in times for mode in modes},
        **row,
    }  # fmt: skip
    return [each for line in whole_models.judged(given, drawn=False) for each in line["missed"]]


def test_bars_are_those_of_the_size() -> None:
    assert missed(100, 90, 80) == []  # recovered .5
    assert missed(100, 91, 80) == ["recovered 0.45, bar 0.5"]
    assert missed(100, 91, 80, measure="prefill") == ["recovered 0.45, bar 0.65"]
    assert missed(100, 91, 80, tokens=2048) == []
    assert missed(100, 95, 80, tokens=2048) == ["recovered 0.25, bar 0.3"]  # in graphs alone
    assert missed(100, 95, 80, tokens=2048, modes=("compiled",)) == []
    assert missed(100, 100, 96) == []  # there is little to recover
    assert missed(100, 102, 96, modes=("eager",)) == ["1.020 of torch"]
    assert missed(100, 200, 80, cuda=False) == []


def test_bars_of_memory_and_of_ours_beside_each_other() -> None:
    contenders = {
        "torch compiled": entry(100, peak_mb=100.0),
        "nn compiled": entry(90, peak_mb=120.0),
        "pass compiled": entry(95, peak_mb=100.0, calls_wrong="1 x all_gather_gemm, 2 to 2 wanted"),
        "floor compiled": entry(80),
    }
    assert missed(0, 0, 0, contenders=contenders) == [
        "1.20 of torch's peak memory",
        "1 x all_gather_gemm, 2 to 2 wanted",
        "recovered 0.25, bar 0.5",
        "1.056 between ours, bar 1.03",
    ]


def test_ours_are_judged_by_nothing_that_failed() -> None:
    contenders = {"torch compiled": {"failed": "wrong: result"}, "nn compiled": entry(90)}
    assert missed(0, 0, 0, contenders=contenders) == ["torch compiled: wrong: result"]


def test_drawn_sizes_fit_the_ranks() -> None:
    import whole_models

    drawn = whole_models.drawn_sizes(7, 50, 2, None)
    assert drawn == whole_models.drawn_sizes(7, 50, 2, None)
    assert len({*drawn}) > 40
    for each in drawn:
        assert each.tokens % (16 * each.batch) == 0
        assert 480 <= each.tokens <= 16384 + 64
