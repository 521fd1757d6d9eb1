"""What rank processes of test_models run: models, made parallel in ways that people make them so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import titan
import torch
from groups_in_ranks import TIMEOUT_S, mesh_2x2
from models_judged import Found, Judge, counted, shards_of
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module, style
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import mkernel

B, S, NEW = 4, 8, 4
"""Sequences of a batch, their length, and tokens that are generated."""
Make = Callable[..., nn.Module]
SIZES: dict[str, Any] = {
    "vocab_size": titan.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WIDE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 8,
}
"""The widths of a Qwen3-MoE of 30B, with an eighth of its experts, and of a Llama of about 1B."""


def llama(**sizes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**SIZES, "attention_bias": True, "mlp_bias": True, **sizes})
    model: nn.Module = LlamaForCausalLM(config)
    for name, each in model.named_parameters():  # nobody would miss biases that start as zeros
        if name.endswith("bias"):
            nn.init.normal_(each, std=0.02)
    return model


def qwen3_moe(**sizes: Any) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    few = {"moe_intermediate_size": 32, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**{**SIZES, **few, "norm_topk_prob": True, **sizes})
    config._experts_implementation = "eager"  # the default one has no float64
    model: nn.Module = Qwen3MoeForCausalLM(config)
    return model


def tied_llama(**sizes: Any) -> nn.Module:
    """A model whose head is its embedding."""
    return llama(tie_word_embeddings=True, **sizes)


def torchtitan(num_hidden_layers: int = 2) -> nn.Module:
    return titan.Transformer(num_hidden_layers)


def seeded(make: Make, **sizes: Any) -> nn.Module:
    """Random weights, the same in every process."""
    torch.manual_seed(0)
    return make(**sizes)


def tokens_of(batch: int, sequence: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(titan.VOCABULARY, (batch, sequence), generator=generator)


def parallel(
    make: Make, tp: DeviceMesh, cast: Mapping[str, Any] = MappingProxyType({}), **sizes: Any
) -> nn.Module:
    """The lines that a user writes. ``cast``: where the model goes first, and its dtype."""
    model = seeded(make, **sizes).to(**cast)
    if make is torchtitan:
        titan.apply_tp(model, tp, mkernel.nn)
    else:
        parallelize_module(model, tp, mkernel.nn.transformers_plan(model))
    return model


def blocks(model: Any) -> nn.Module:
    """A model's layers, by number."""
    found: nn.Module = model.layers if hasattr(model, "layers") else model.model.layers
    return found


# ---- what is done with a parallel model ----------------------------------------------------------


def eager(model: nn.Module, dp: DeviceMesh) -> nn.Module:
    return model


def compiled_blocks(model: nn.Module, dp: DeviceMesh) -> nn.Module:
    for block in blocks(model).children():
        block.compile(backend="aot_eager")
    return model


def compiled_whole(model: nn.Module, dp: DeviceMesh) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def generated_code(model: nn.Module, dp: DeviceMesh) -> nn.Module:
    """By block, with Inductor."""
    for block in blocks(model).children():
        block.compile()
    return model


def fsdp(model: nn.Module, dp: DeviceMesh) -> nn.Module:
    for block in blocks(model).children():
        fully_shard(block, mesh=dp)
    fully_shard(model, mesh=dp)
    return model


def ddp(model: nn.Module, dp: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, device_mesh=dp)


def checkpointed(model: nn.Module, dp: DeviceMesh, **options: Any) -> nn.Module:
    if hasattr(model, "config"):  # a cache would have a layer's keys twice
        model.config.use_cache = False  # type: ignore[union-attr]
    for name, block in list(blocks(model).named_children()):
        blocks(model).register_module(name, checkpoint_wrapper(block, **options))
    return model


def selectively(model: nn.Module, dp: DeviceMesh) -> nn.Module:
    """Keep the sums over ranks, compute the rest again."""
    saved = [
        torch.ops.mkernel.gemm_all_reduce.default,
        torch.ops.mkernel.gemm_reduce_scatter.default,
    ]
    context = partial(create_selective_checkpoint_contexts, saved)
    return checkpointed(model, dp, context_fn=context)


MODELS = (llama, qwen3_moe, torchtitan)
ONE_BY_ONE = (eager, checkpointed, selectively)
DATA_PARALLEL = (*((make, fsdp) for make in MODELS), (llama, ddp))
COMPILED_IN_CI = ((llama, compiled_whole), (torchtitan, compiled_blocks))
COMPILED = (
    (llama, compiled_blocks),
    (qwen3_moe, compiled_blocks),
    (torchtitan, compiled_whole),
    (qwen3_moe, compiled_whole),
    (llama, generated_code),
)


def generated(model: Any, unsharded: Any, tp: DeviceMesh) -> tuple[bool, dict[str, int]]:
    """Whether both generate the same tokens, with a cache, and the calls of that."""
    prompts = tokens_of(3, 5)  # ranks share neither 3 tokens nor 15
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    with counted(tp) as calls:
        found = model.generate(prompts, **options)
    return torch.equal(found, unsharded.generate(prompts, **options)), dict(calls)


# ---- what must be seen ---------------------------------------------------------------------------


def local(model: nn.Module, name: str) -> Tensor:
    each = model.get_parameter(name)
    assert isinstance(each, DTensor)
    return each._local_tensor


def without_bias(name: str, model: nn.Module, tp: DeviceMesh) -> None:
    if tp.get_local_rank() == 1:
        local(model, name).zero_()


def swapped(name: str, model: nn.Module, tp: DeviceMesh) -> None:
    """Ranks have each other's shards of a parameter."""
    mine = local(model, name)
    every = [
        torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(tp.size())
    ]
    torch.distributed.all_gather(every, mine.contiguous(), group=tp.get_group())
    mine.copy_(every[1 - tp.get_local_rank()])


def unsummed(name: str, model: nn.Module, tp: DeviceMesh) -> None:
    """A norm of heads has the gradient of one rank's heads."""
    norm = model.get_submodule(name)
    norm.__class__ = type(norm).__mro__[1]
    mkernel.nn.ReplicatedParallel(split_input=False)._apply(norm, tp)


LAYER = "model.layers.0"
FAULTS: dict[str, tuple[Make, Callable[[nn.Module, DeviceMesh], None]]] = {
    "a rank leaves out its bias": (llama, partial(without_bias, f"{LAYER}.self_attn.q_proj.bias")),
    "columns are swapped": (llama, partial(swapped, f"{LAYER}.mlp.up_proj.weight")),
    "rows are swapped": (torchtitan, partial(swapped, "layers.1.attention.wo.weight")),
    "tokens are swapped": (torchtitan, partial(swapped, "tok_embeddings.weight")),
    "experts are swapped": (qwen3_moe, partial(swapped, f"{LAYER}.mlp.experts.down_proj")),
    "a norm's gradient is not summed": (qwen3_moe, partial(unsummed, f"{LAYER}.self_attn.q_norm")),
}


def every_way(long: bool) -> dict[str, Any]:
    """What is found of each model in each way, and of each fault, in ranks 2 x 2.

    What has no data parallelism runs in one of the two tensor-parallel groups: the other is faster for
    doing something else meanwhile. ``long``: the ways of compiling that take too long for CI.
    """
    mesh = mesh_2x2()
    tp, dp = mesh["tp"], mesh["dp"]
    mkernel.init(tp, accelerator="streams", timeout_s=TIMEOUT_S)
    first = dp.get_local_rank() == 0
    found: dict[str, Any] = {}

    def run(
        make: Make, way: Callable[..., nn.Module], part: slice = slice(B), **sizes: Any
    ) -> Judge:
        judge = Judge(seeded(make, **sizes), tokens_of(B, S))
        model = parallel(make, tp, **sizes)
        shards = shards_of(model)
        name = f"{make.__name__}, {way.__name__}"
        profile = way is eager or (make, way) in (*COMPILED, *COMPILED_IN_CI)
        found[name] = judge.found(way(model, dp), tp, shards, part, profile=profile)
        return judge

    if long:
        for make, way in COMPILED[:3] if first else COMPILED[3:]:
            run(make, way, num_hidden_layers=1)
        return found
    half = B // dp.size() * dp.get_local_rank()
    for make, way in DATA_PARALLEL:
        run(make, way, slice(half, half + B // dp.size()))
    if first:
        for make, way in COMPILED_IN_CI:
            run(make, way, num_hidden_layers=1)
        for make in (llama, qwen3_moe):
            unsharded = seeded(make)
            found[f"{make.__name__}, generate"] = generated(parallel(make, tp), unsharded, tp)
        return found
    run(tied_llama, eager)
    for make in MODELS:
        for way in ONE_BY_ONE:
            judge = run(make, way)
        for fault, (of, plant) in FAULTS.items():
            if of is make:
                model = parallel(make, tp)
                with torch.no_grad():
                    plant(model, tp)
                found[fault] = judge.found(model, tp, shards_of(model))
    return found


def wide() -> dict[str, Any]:
    """Layers of real width, on two ranks."""
    tp = init_device_mesh("cpu", (2,))
    mkernel.init(tp, accelerator="streams", timeout_s=TIMEOUT_S)
    found = {}
    for make in (llama, qwen3_moe):
        judge = Judge(seeded(make, **WIDE), tokens_of(2, 33))
        model = parallel(make, tp, **WIDE)
        found[f"{make.__name__}, wide"] = judge.found(model, tp, shards_of(model))
    return found


class _TorchStyles:
    """torch's styles, but for the embedding: behind torch's, compiled blocks have no gradients."""

    ColwiseParallel: Any = style.ColwiseParallel
    PrepareModuleInput: Any = style.PrepareModuleInput

    @staticmethod
    def RowwiseParallel(**layouts: Any) -> Any:
        ours = "input_layouts" in layouts
        return (mkernel.nn if ours else style).RowwiseParallel(**layouts)


def torch_styles() -> tuple[Found, str]:
    """A step of the plan with torch's styles and this package's pass, and what that reports."""
    tp = init_device_mesh("cpu", (2,))
    mkernel.init(tp, accelerator="streams", timeout_s=TIMEOUT_S)
    judge = Judge(seeded(torchtitan, num_hidden_layers=1), tokens_of(B, S))
    async_tp = mkernel.enable_async_tensor_parallel()
    model = seeded(torchtitan, num_hidden_layers=1)
    titan.apply_tp(model, tp, _TorchStyles())
    found = judge.found(generated_code(model, tp), tp, shards_of(model))
    return found, str(async_tp.report)
