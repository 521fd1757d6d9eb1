"""Models that people have, parallel in three lines: they are the unsharded ones, by fused ops.

A Llama and a Qwen3-MoE of transformers by ``transformers_plan``, torchtitan's Llama by its own plan.
Each trains a step in every way that people train models, and the first two generate. Results and
gradients are compared with float64; calls are counted, so that falling back to torch is no way to pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from groups_in_ranks import ranks
from model_ranks import FAULTS, NEW, every_way, llama, seeded, torch_styles, wide
from models_judged import Found
from once import once
from torch import nn

from mkernel.errors import ArgumentError
from mkernel.nn import transformers_plan

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

LAYERS = 2
COMPILED = ("compiled_blocks", "compiled_whole", "generated_code")
"""Ways in which a model has one layer."""
MOE = (
    "moe_dispatch_gemm",
    "moe_gemm_combine",
    "moe_dispatch_backward",
    "moe_gemm_combine_backward",
)
A_LAYER: dict[str, dict[str, int]] = {
    # o and down forward; backward the input of q, k and v, and that of gate and up.
    "llama": {"gemm_all_reduce": 2 + 2},
    "tied_llama": {"gemm_all_reduce": 2 + 2},
    "qwen3_moe": {"gemm_all_reduce": 1 + 1, **dict.fromkeys(MOE, 1)},
    # Forward the input of wq, wk and wv, and that of w1 and w3, is gathered; backward those gradients
    # of wo and w2 are. What was gathered forward the gradients of the weights multiply.
    "torchtitan": {"all_gather_gemm": 2 + 2, "gemm_reduce_scatter": 2 + 2},
}
ONCE: dict[str, dict[str, int]] = {
    "llama": {"all_reduce": 1},  # the embedding; one that is tied to the head is whole
    "tied_llama": {},
    "qwen3_moe": {"all_reduce": 1},
    "torchtitan": {"all_gather_gemm": 1, "gemm_reduce_scatter": 1},  # the head
}
AGAIN: dict[str, dict[str, dict[str, int]]] = {
    "checkpointed": {
        "llama": {"gemm_all_reduce": 2},
        "qwen3_moe": {"gemm_all_reduce": 1, "moe_dispatch_gemm": 1, "moe_gemm_combine": 1},
        "torchtitan": {"all_gather_gemm": 2, "gemm_reduce_scatter": 2},
    },
    "selectively": {  # sums over ranks are saved
        "qwen3_moe": {"moe_dispatch_gemm": 1, "moe_gemm_combine": 1},
        "torchtitan": {"all_gather_gemm": 2},
    },
}
"""What a layer calls again in the backward pass of a checkpointed step."""


def by_name(results: list[dict[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for rank in results:
        for name, each in rank.items():
            found[name].append(each)
    return found


@pytest.fixture(scope="module")
def every(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    """What ranks found, by model and way. They are started once."""
    folder = tmp_path_factory.mktemp("models")
    return by_name(once(request, lambda: ranks(every_way, folder, False)))


def expected(model: str, way: str) -> Counter[str]:
    """The calls of a training step."""
    layers = 1 if way in COMPILED else LAYERS
    calls = Counter(ONCE[model])
    for counts in (A_LAYER[model], AGAIN.get(way, {}).get(model, {})):
        calls += Counter({op: layers * count for op, count in counts.items()})
    return calls


def judge(found: dict[str, list[Any]]) -> int:
    """Judge every training step, and return how many there were."""
    steps = 0
    for name, results in found.items():
        if name in FAULTS or name.endswith("generate"):
            continue
        model, way = name.split(", ")
        for each in results:
            steps += 1
            assert isinstance(each, Found)
            assert not each.wrong, f"{name}: more than {each.allowed:.1e}: {each.wrong}"
            assert len(each.errors) > 12, name
            if way == "wide":
                continue
            assert each.calls == expected(model, way), name
            named = {op: each.profiled.get(op) for op in each.calls}
            if way == "eager":
                assert named == each.calls, f"{name}: {each.profiled}"
            if way in COMPILED:  # tracing is seen too
                assert all(named.values()), f"{name}: {each.profiled}"
    return steps


def test_training_steps_are_the_unsharded_ones(every: dict[str, list[Any]]) -> None:
    ways, data_parallel, compiled = 3 * 3 + 1, 3 + 1, 2
    assert judge(every) == 2 * ways + 4 * data_parallel + 2 * compiled


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_the_same_tokens_are_generated(model: str, every: dict[str, list[Any]]) -> None:
    """Each token is a forward pass, of few rows and with a cache."""
    forward = {
        "llama": {"gemm_all_reduce": 2},
        "qwen3_moe": {"gemm_all_reduce": 1, "moe_dispatch_gemm": 1, "moe_gemm_combine": 1},
    }[model]
    calls = {"all_reduce": NEW, **{op: NEW * LAYERS * count for op, count in forward.items()}}
    assert every[f"{model}, generate"] == [(True, calls)] * 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, every: dict[str, list[Any]]) -> None:
    for each in every[fault]:
        assert each.wrong
        assert max(each.wrong.values()) > 1000 * each.allowed


def test_plans_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="a model with a tp_plan"):
        transformers_plan(nn.Linear(2, 2))
    model = seeded(llama)
    model._tp_plan = {"model.layers.*.mlp.up_proj": "packed_colwise"}  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match=r"model\.layers\.\*\.mlp\.up_proj.*packed_colwise"):
        transformers_plan(model)


@pytest.mark.long
def test_compiled_in_every_way(tmp_path: Path) -> None:
    assert judge(by_name(ranks(every_way, tmp_path, True))) == 2 * 5


@pytest.mark.long
def test_layers_of_real_width(tmp_path: Path) -> None:
    assert judge(by_name(ranks(wide, tmp_path, size=2))) == 2 * 2


@pytest.mark.long
def test_the_pass_takes_the_plan_with_torchs_styles(tmp_path: Path) -> None:
    for found, report in ranks(torch_styles, tmp_path, size=2):
        assert not found.wrong
        # What q, k and v read, and w1 and w3, is one gather each; wo and w2 gather in backward.
        assert found.calls["all_gather_gemm"] == 4, report
        assert found.calls["gemm_reduce_scatter"] >= 2, report
