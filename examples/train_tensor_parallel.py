"""Train a small language model tensor parallel, beside the same model unsharded: the losses agree.

    torchrun --nproc-per-node 2 examples/train_tensor_parallel.py   # on GPUs where there are any
    torchrun --nproc-per-node 2 examples/train_tensor_parallel.py --compile
    torchrun --nproc-per-node 2 examples/train_tensor_parallel.py \
        --accelerator hopper --dtype bfloat16 --tolerance 0.1       # fused kernels take no float32

Between its blocks a rank holds its part of every sequence: [batch, sequence / W, hidden].
  attention   ``mkernel.nn.ParallelAttention``: its heads, of all positions
  MLP         ``mkernel.nn.ParallelMLP``: its features
Embeddings, norms and head act on single positions; every rank has them whole, and their gradients are
summed over the ranks. The text counts in steps, so there is something to learn.

Exit code 1 where a loss differs by more than --tolerance from the unsharded model's.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import mkernel
from mkernel.nn import ParallelAttention, ParallelMLP

VOCABULARY, HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 64, 128, 4, 2, 2
BATCH, SEQUENCE = 8, 32


class MLP(nn.Module):
    """Unsharded."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Unsharded."""

    def __init__(self) -> None:
        super().__init__()
        keys = HIDDEN // HEADS * KV_HEADS
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(HIDDEN, keys, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Of whole sequences, or of a rank's part of them."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.tokens, self.places = (nn.Embedding(n, HIDDEN) for n in (VOCABULARY, SEQUENCE))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def unsharded() -> Model:
    return Model([Block(Attention(), MLP()) for _ in range(LAYERS)])


def sharded() -> Model:
    blocks = [
        Block(ParallelAttention(HIDDEN, HEADS, KV_HEADS), ParallelMLP(HIDDEN, INNER))
        for _ in range(LAYERS)
    ]
    return Model(blocks)


def whole_parameters(model: Model) -> list[Tensor]:
    """What every rank has whole, whose gradient is the sum of what the ranks' positions give."""
    shared = [model.tokens, model.places, model.head, *(block.norms for block in model.blocks)]
    return [parameter for module in shared for parameter in module.parameters()]


def text(generator: torch.Generator) -> Tensor:
    """[batch, sequence + 1]: each counts from a number of its own, in steps of its own."""
    first, step = torch.randint(1, VOCABULARY, (2, BATCH, 1), generator=generator)
    return (first + (step % 5 + 1) * torch.arange(SEQUENCE + 1)) % VOCABULARY


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of a loss, absolute")
    parser.add_argument("--compile", action="store_true", help="the sharded model by torch.compile")
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
    reference, model = unsharded(), sharded()
    model.load_state_dict(reference.state_dict())  # each rank takes its part
    run = torch.compile(model) if options.compile else model
    optimizers = [torch.optim.AdamW(each.parameters(), lr=3e-3) for each in (reference, model)]
    generator = torch.Generator(device).manual_seed(1)
    places = torch.arange(SEQUENCE)
    mine = places.chunk(world.size)[world.rank]

    worst = 0.0
    for step in range(options.steps):
        tokens = text(generator)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]

        logits = reference(inputs, places)
        expected = cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        expected.backward()

        logits = run(inputs[:, mine], mine)
        loss = cross_entropy(logits.flatten(0, 1).float(), labels[:, mine].flatten()) / world.size
        loss.backward()
        loss = loss.detach()
        for shared in (loss, *(parameter.grad for parameter in whole_parameters(model))):
            dist.all_reduce(shared)

        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, abs(loss.item() - expected.item()))
        if world.rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {loss.item():.4f}, unsharded {expected.item():.4f}")

    print(
        f"rank {world.rank} of {world.size} on {world.backends.accelerator}: "
        f"losses differ by {worst:.1e} at most"
    )
    mkernel.finalize()
    dist.destroy_process_group()
    return 0 if worst <= options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
