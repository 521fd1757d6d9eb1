"""MoE blocks of transformers whose experts are in e4m3: from files as transformers writes them, beside
transformers' own block of the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from e4m3_faults import FAULTS
from ranks import on_ranks, operand
from torch import Tensor

import mkernel
from mkernel.nn import ExpertParallelMLP, experts

fine_grained = pytest.importorskip(
    "transformers.integrations.finegrained_fp8", reason="no transformers with e4m3 by blocks"
)
if not hasattr(fine_grained, "FP8Experts"):
    pytest.skip("transformers before 5 has no joined experts in e4m3", allow_module_level=True)

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS, H, INNER, EXPERTS, TOP_K = 2, 256, 256, 8, 3
E4M3 = torch.float8_e4m3fn
MLP = "model.layers.0.mlp"
ROUNDING = 2**-5
"""The mean error of a rounding to e4m3, of a matrix: an element is off by 1/16 at most."""
LIMITS = {"e4m3": 3**0.5 * ROUNDING, "bfloat16": 6**0.5 * ROUNDING}
"""Roundings are independent: those of the token in gate and up and of the row that down multiplies, and
of a bfloat16 checkpoint the weights of these three."""
SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": H, "intermediate_size": 64, "moe_intermediate_size": INNER,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
}  # fmt: skip


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"num_experts": EXPERTS, "num_key_value_heads": 1, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes))


def deepseek_v3() -> Any:
    """Shared experts, groups of experts, and a correction of the scores by which they are chosen."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    heads = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 16}
    sizes = {"n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    config = DeepseekV3Config(
        **SIZES, **heads, **sizes, kv_lora_rank=16, num_key_value_heads=2, first_k_dense_replace=0
    )
    model = DeepseekV3ForCausalLM(config)
    model.get_submodule(MLP).gate.e_score_correction_bias.copy_(operand("bias", 0, EXPERTS) / 4)
    return model


MODELS = {"Qwen3-MoE": qwen3_moe, "DeepSeek-V3": deepseek_v3}


def whole(name: str) -> Any:
    """A model in bfloat16, the same in every process; blocks of weights are of unlike sizes."""
    torch.manual_seed(0)
    with torch.no_grad():
        model = MODELS[name]()
        model.config._experts_implementation = "eager"
        block = model.get_submodule(MLP)
        block.gate.weight.copy_(operand("gate", 0, EXPERTS, H) / 8)
        for part, each in block.experts.named_parameters():
            count, n, k = each.shape
            size = operand(part, 1, count, n // 128, k // 128).exp() / 16
            size = size.repeat_interleave(128, 1).repeat_interleave(128, 2)
            each.copy_(operand(part, 0, count, n, k) * size)
    return model.to(torch.bfloat16).requires_grad_(False)


def is_expert(key: str) -> bool:
    return ".experts." in key


@pytest.fixture(scope="module", params=MODELS)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model's name and the file that transformers writes of it."""
    folder = tmp_path_factory.mktemp("model")
    whole(request.param).save_pretrained(folder)
    return request.param, folder / "model.safetensors"


def entries_of(file: Path, kind: str) -> dict[str, Tensor]:
    """The entries of a file; for e4m3 experts' weights are quantised by transformers."""
    from safetensors.torch import load_file
    from transformers import FineGrainedFP8Config

    found: dict[str, Tensor] = load_file(file)
    assert f"{MLP}.experts.{EXPERTS - 1}.down_proj.weight" in found
    if kind == "bfloat16":
        return found
    how = SimpleNamespace(quantization_config=FineGrainedFP8Config())
    scaled = fine_grained.Fp8Quantize(how).convert({k: v for k, v in found.items() if is_expert(k)})
    assert sum(key.endswith("weight_scale_inv") for key in scaled) == 3 * EXPERTS
    return {**found, **scaled}


def joined(entries: dict[str, Tensor], suffix: str = "") -> dict[str, Tensor]:
    """Experts' entries as transformers' modules have them."""
    gate, up, down = (
        torch.stack(
            [entries[f"{MLP}.experts.{e}.{part}_proj.weight{suffix}"] for e in range(EXPERTS)]
        )
        for part in ("gate", "up", "down")
    )
    return {f"gate_up_proj{suffix}": torch.cat((gate, up), 1), f"down_proj{suffix}": down}


def theirs(model: Any, entries: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The result of transformers' block with what it makes of the entries on a CPU, and the part of
    it that routed experts have."""
    block, routed = model.get_submodule(MLP), []
    weights = joined(entries)
    if weights["down_proj"].dtype == E4M3:
        wide = fine_grained.Fp8Dequantize(None).convert(weights | joined(entries, "_scale_inv"))
        weights = {name: wide[name][0] for name in weights}
    block.experts.load_state_dict(weights)
    hook = block.experts.register_forward_hook(lambda _, given, out: routed.append(out))
    out = block(x)
    hook.remove()
    return out, routed[0]


def off(name: str, file: Path, kind: str) -> tuple[dict[str, float], list[Any]]:
    """Return how far a rank's results are from transformers', with each fault, and in which dtypes rows
    were multiplied."""
    x, found = operand("x", mkernel.world().rank, 2, 11, H, dtype=torch.bfloat16), []

    def combine(h: Tensor, *arguments: Any, **options: Any) -> Tensor:
        found.append(h.dtype)
        return mkernel.moe_gemm_combine(h, *arguments, **options)

    entries, model, errors = entries_of(file, kind), whole(name), {}
    wanted, routed = theirs(whole(name), entries, x)
    block = model.get_submodule(MLP)
    act = block.experts.act_fn
    block.experts = ExpertParallelMLP(
        H, INNER, EXPERTS, transposed=True, activation=act, dtype=E4M3
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "moe_gemm_combine", combine)
        for fault, plant in FAULTS.items():
            model.load_state_dict(entries)
            plant(block.experts)
            out = block(x)
            assert out.dtype == torch.bfloat16
            error = (out.double() - wanted.double()).norm() / routed.double().norm()
            errors[fault] = float(error)
    return errors, found


@pytest.mark.parametrize("kind", LIMITS)
def test_a_block_is_transformers_own_and_faults_are_seen(file: tuple[str, Path], kind: str) -> None:
    for errors, dtypes in on_ranks(off, *file, kind, ranks=RANKS):
        assert dtypes == [E4M3] * len(FAULTS), "the first op quantises, in one step with SiLU"
        assert ROUNDING / 2 < errors.pop("none") <= LIMITS[kind], "roundings, and no more"
        seen = {fault: error > 2 * LIMITS[kind] for fault, error in errors.items()}
        assert all(seen.values()), errors


def from_module(name: str, file: Path) -> None:
    """Compare what ``from_experts`` makes of transformers' modules with what a file's entries give."""
    entries, model = entries_of(file, "e4m3"), whole(name)
    theirs = fine_grained.FP8Experts(model.config, block_size=(128, 128))
    theirs.load_state_dict({**joined(entries), **joined(entries, "_scale_inv")})
    of_halves = model.get_submodule(MLP).experts
    of_halves.load_state_dict(joined(entries_of(file, "bfloat16")))
    for module, kind in ((theirs, "e4m3"), (of_halves, "bfloat16")):
        made = ExpertParallelMLP.from_experts(module, transposed=True, dtype=E4M3)
        wanted = ExpertParallelMLP(H, INNER, EXPERTS, transposed=True, dtype=E4M3)
        single = {
            key.removeprefix(f"{MLP}.experts."): each
            for key, each in entries_of(file, kind).items()
            if is_expert(key)
        }
        wanted.load_state_dict(single)
        for each, other in zip(made.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(each.view(torch.uint8), other.view(torch.uint8))
    assert ExpertParallelMLP.from_experts(theirs, transposed=True).down_proj.dtype == E4M3


def test_modules_of_experts_are_taken_as_files_are(file: tuple[str, Path]) -> None:
    on_ranks(from_module, *file, ranks=RANKS)
