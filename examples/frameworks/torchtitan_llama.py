"""Train torchtitan's Llama 3 by its own plan: as published, with mkernel's styles, with its pass.

    pip install torchtitan==0.2.2 triton     # docs/frameworks/torchtitan.md has all versions
    torchrun --nproc-per-node 2 examples/frameworks/torchtitan_llama.py    # on GPUs where there are any
    torchrun --nproc-per-node 4 examples/frameworks/torchtitan_llama.py --tp 2    # FSDP2 over pairs

Model, plan, loss and clipping are torchtitan's, from the installed package. The text counts in steps,
so there is something to learn. Exit code 1 where losses differ by more than --tolerance from those
without mkernel, where they do not fall, or where no product was fused.
"""

import argparse
import os
import sys
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import mkernel

if not torch.accelerator.is_available():  # torchtitan takes "cuda" for the device then
    torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_, get_train_context
from torchtitan.models.llama3 import Transformer, llama3_args
from torchtitan.models.llama3.infra import parallelize

BATCH, SEQUENCE, COUNTED = 2, 64, 64
TORCHS = {
    name: getattr(parallelize, name)
    for name in ("ColwiseParallel", "PrepareModuleInput", "RowwiseParallel")
}
OURS = {name: getattr(mkernel.nn, name) for name in TORCHS}
WAYS = {
    "published": TORCHS,
    "styles": OURS,
    # Blocks are compiled. Torch 2.13 has no gradients of such behind its own style of embeddings.
    "pass": {**TORCHS, "RowwiseParallel": OURS["RowwiseParallel"]},
}


def text(generator: torch.Generator, groups: int) -> Tensor:
    """[groups, batch, sequence + 1]: each line counts from a number of its own, in steps of its own."""
    first, step = torch.randint(1, COUNTED, (2, groups, BATCH, 1), generator=generator)
    return (first + (step % 5 + 1) * torch.arange(SEQUENCE + 1)) % COUNTED


def losses(
    way: str, dims: ParallelDims, device: torch.device, steps: int, layers: int
) -> list[float]:
    """The loss of each step, of all ranks' tokens."""
    vars(parallelize).update(WAYS[way])  # the names that torchtitan's plan was imported with
    config = JobConfig()
    config.training.seq_len = SEQUENCE
    config.training.mixed_precision_param = "float32"
    config.compile.enable = way == "pass"
    config.compile.components = ["model"]
    config.activation_checkpoint.mode = "none"
    arguments = replace(llama3_args["debugmodel"], n_layers=layers)
    arguments.update_from_config(config)

    torch.manual_seed(0)  # the same weights on every rank
    with torch.device(device), torch.no_grad():
        model = Transformer(arguments)
        model.init_weights()
    model = parallelize.parallelize_llama(model, dims, config)
    for module in model.modules():
        if device.type == "cpu" and isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    train_context = get_train_context(not config.parallelism.disable_loss_parallel)
    generator = torch.Generator().manual_seed(1)
    groups = dims.dp_shard
    group = dims.get_mesh("batch").get_group() if groups > 1 else None
    mine = dims.get_mesh("batch").get_local_rank() if groups > 1 else 0

    found = []
    for _ in range(steps):
        tokens = text(generator, groups)[mine].to(device)
        with train_context():
            summed = cross_entropy_loss(model(tokens[:, :-1]), tokens[:, 1:])
            loss = summed / (groups * BATCH * SEQUENCE)
            loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        if group is not None:
            dist.all_reduce(whole, group=group)
        found.append(whole.item())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, help="ranks of a tensor-parallel group; default: all")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2, help="of the debug model, which has 6")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of a loss, absolute")
    parser.add_argument("--accelerator", default="streams")
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    size = dist.get_world_size()
    tp = options.tp or size
    dims = ParallelDims(
        dp_replicate=1, dp_shard=size // tp, cp=1, tp=tp, pp=1, ep=1, etp=1, world_size=size
    )
    mkernel.init(dims.get_mesh("tp"), accelerator=options.accelerator)

    curves, calls = {}, {}
    for way in WAYS:
        before = mkernel.stats(group=dims.get_mesh("tp")).calls
        compiled = mkernel.enable_async_tensor_parallel() if way == "pass" else nullcontext()
        with compiled:
            curves[way] = losses(way, dims, device, options.steps, options.layers)
        after = mkernel.stats(group=dims.get_mesh("tp")).calls
        calls[way] = sum(after.values()) - sum(before.values())
    reference = curves["published"]
    good = reference[-1] < reference[0] and calls["published"] == 0
    for way in ("styles", "pass"):
        worst = max(abs(a - b) for a, b in zip(curves[way], reference, strict=True))
        good = good and worst <= options.tolerance and calls[way] > 0
        if dist.get_rank() == 0:
            print(
                f"{way}: losses {reference[0]:.3f} to {curves[way][-1]:.3f}, from those without "
                f"mkernel they differ by {worst:.1e} at most; {calls[way]} fused calls"
            )
    mkernel.finalize()
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
