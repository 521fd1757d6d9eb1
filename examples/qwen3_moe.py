"""Train a small Qwen3-MoE expert parallel, beside the same model unsharded: the losses agree.

    torchrun --nproc-per-node 2 examples/qwen3_moe.py   # on GPUs where there are any
    torchrun --nproc-per-node 2 examples/qwen3_moe.py \
        --accelerator hopper,streams --dtype bfloat16 --tolerance 0.1

Each rank has a batch of its own and, of each layer, its part of the experts; all else it has whole, and
the gradients of that are averaged over the ranks. One line shares the experts of a layer out. With
``hopper,streams`` fused kernels run the layer, and ``streams`` its gradients; without gradients the
activation is part of the first kernel. The text counts in steps, so there is something to learn.

Exit code 1 where a loss differs by more than --tolerance from the unsharded model's.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import mkernel
from mkernel.nn import ExpertParallelMLP

VOCABULARY, BATCH, SEQUENCE = 64, 8, 32


def unsharded() -> Qwen3MoeForCausalLM:
    """Of random weights."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    return Qwen3MoeForCausalLM(config)


def share_experts(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.experts = ExpertParallelMLP.from_experts(layer.mlp.experts, transposed=True)


def text(generator: torch.Generator, ranks: int) -> Tensor:
    """[ranks, batch, sequence + 1]: each counts from a number of its own, in steps of its own."""
    first, step = torch.randint(1, VOCABULARY, (2, ranks, BATCH, 1), generator=generator)
    return (first + (step % 5 + 1) * torch.arange(SEQUENCE + 1)) % VOCABULARY


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean over a batch."""
    logits = model(input_ids=tokens[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def averaged(value: Tensor, ranks: int) -> Tensor:
    """Over the ranks, in place."""
    dist.all_reduce(value)
    return value.div_(ranks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of a loss, absolute")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--accelerator", default="streams")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    world = mkernel.init(accelerator=options.accelerator)
    torch.set_default_dtype(getattr(torch, options.dtype))
    torch.set_default_device(device)

    torch.manual_seed(0)
    reference = unsharded()
    model = unsharded()
    model.load_state_dict(reference.state_dict())
    share_experts(model)
    # Adam divides by a gradient's size. With an eps of 1e-8 gradients that are nothing but rounding
    # move weights as far as any, and two orders of adding end at losses that differ by 4e-3.
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=3e-3, eps=1e-4) for each in (reference, model)
    ]
    generator = torch.Generator(device).manual_seed(1)

    worst = 0.0
    for step in range(options.steps):
        tokens = text(generator, world.size)
        expected = loss_of(reference, tokens.flatten(0, 1))
        expected.backward()

        loss = loss_of(model, tokens[world.rank])
        loss.backward()
        loss = averaged(loss.detach(), world.size)
        for name, parameter in model.named_parameters():
            if ".experts." in name:  # of all ranks' losses, added
                parameter.grad /= world.size
            else:
                averaged(parameter.grad, world.size)

        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, abs(loss.item() - expected.item()))
        if world.rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {loss.item():.4f}, unsharded {expected.item():.4f}")

    tokens = text(generator, world.size)
    with torch.no_grad():
        unseen = averaged(loss_of(model, tokens[world.rank]), world.size).item()
        worst = max(worst, abs(unseen - loss_of(reference, tokens.flatten(0, 1)).item()))
    print(
        f"rank {world.rank} of {world.size} on {world.backends.accelerator}: "
        f"losses differ by {worst:.1e} at most"
    )
    mkernel.finalize()
    dist.destroy_process_group()
    return 0 if worst <= options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
