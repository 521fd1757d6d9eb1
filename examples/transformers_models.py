"""Train and sample a small Llama and a small Qwen3-MoE of transformers, beside the unsharded models.

    torchrun --nproc-per-node 2 examples/transformers_models.py   # on GPUs where there are any
    torchrun --nproc-per-node 4 examples/transformers_models.py --tp 2  # FSDP2 over pairs of ranks
    torchrun --nproc-per-node 2 examples/transformers_models.py \
        --accelerator hopper,streams --dtype bfloat16 --tolerance 0.1   # fused kernels take no float32

Two lines make a model tensor parallel: ``mkernel.init``, and ``parallelize_module`` with the model's
own plan. Ranks of one tensor-parallel group have the same tokens, other groups have others. The text
counts in steps, so there is something to learn.

Exit code 1 where a loss differs by more than --tolerance from the unsharded model's, or, in float32,
where other tokens are generated.
"""

import argparse
import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import mkernel

VOCABULARY, BATCH, SEQUENCE = 64, 4, 32
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
    ),
}


def text(generator: torch.Generator, groups: int) -> Tensor:
    """[groups, batch, sequence]: each line counts from a number of its own, in steps of its own."""
    device = generator.device
    first, step = torch.randint(
        1, VOCABULARY, (2, groups, BATCH, 1), generator=generator, device=device
    )
    return (first + (step % 5 + 1) * torch.arange(SEQUENCE, device=device)) % VOCABULARY


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """The loss, before a step is made."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--tp", type=int, help="ranks of a tensor-parallel group; default: all")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of a loss, absolute")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--accelerator", default="streams")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    tp = options.tp or dist.get_world_size()
    sizes = (dist.get_world_size() // tp, tp)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("dp", "tp"))
    torch.set_default_dtype(getattr(torch, options.dtype))
    torch.set_default_device(device)
    world = mkernel.init(mesh["tp"], accelerator=options.accelerator)

    good = True
    for name in options.models:
        torch.manual_seed(0)
        reference = AutoModelForCausalLM.from_config(CONFIGS[name])
        model = copy.deepcopy(reference)
        parallelize_module(model, mesh["tp"], mkernel.nn.transformers_plan(model))
        if mesh["dp"].size() > 1:
            for block in model.model.layers:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])

        optimizers = [
            torch.optim.AdamW(each.parameters(), lr=3e-3, eps=1e-4) for each in (reference, model)
        ]
        generator = torch.Generator(device).manual_seed(1)
        worst = 0.0
        for _ in range(options.steps):
            tokens = text(generator, mesh["dp"].size())
            expected = trained(reference, optimizers[0], tokens.flatten(0, 1))
            loss = trained(model, optimizers[1], tokens[mesh["dp"].get_local_rank()])
            dist.all_reduce(loss, group=mesh["dp"].get_group())
            worst = max(worst, abs(loss.item() / mesh["dp"].size() - expected.item()))

        prompts = text(generator, 1)[0, :, :8]
        found, wanted = (
            each.generate(prompts, max_new_tokens=8, do_sample=False, pad_token_id=0)
            for each in (model, reference)
        )
        same = int((found == wanted).sum()) - prompts.numel()
        print(
            f"rank {dist.get_rank()} on {world.backends.accelerator}: {name}: losses differ by "
            f"{worst:.1e} at most, {same} of {BATCH * 8} tokens are the same"
        )
        exact = options.dtype != "float32" or same == BATCH * 8
        good = good and worst <= options.tolerance and exact
    mkernel.finalize()
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
