"""Train a tensor-parallel MLP in the workers of Ray Train, beside the unsharded one.

    pip install "ray[train]==2.60.0"
    python examples/frameworks/ray_train.py               # two workers on CPUs
    python examples/frameworks/ray_train.py --gpus        # one GPU each

TorchTrainer starts the workers and initialises torch.distributed, from which `mkernel.init()` makes its
world. Exit code 1 where a worker's losses differ by more than --tolerance from the unsharded MLP's.
"""

import argparse
import sys
import tempfile

import ray
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from torch import nn

import mkernel
from mkernel.nn import ColumnParallelLinear, RowParallelLinear

FEATURES, HIDDEN, ROWS = 32, 128, 64


def losses(model: nn.Module, parameters: list[nn.Parameter], steps: int) -> list[float]:
    """The loss of each step, of the same rows on every worker."""
    device = parameters[0].device
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(ROWS, FEATURES, generator=generator).to(device)
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def work(options: dict) -> None:
    """Train on one worker."""
    device = ray.train.torch.get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = mkernel.init(accelerator=options["accelerator"])
    try:
        torch.manual_seed(0)  # the same weights on every worker
        up, down = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, FEATURES)
        whole = nn.Sequential(up, nn.GELU(), down).to(device)
        part = nn.Sequential(
            ColumnParallelLinear.from_linear(up, sequence_parallel=False),
            nn.GELU(),
            RowParallelLinear.from_linear(down, sequence_parallel=False),
        )
        expected = losses(whole, list(whole.parameters()), options["steps"])
        found = losses(part, list(part.parameters()), options["steps"])
        worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        calls = mkernel.stats().calls["gemm_all_reduce"]
    finally:
        mkernel.finalize()
    context = ray.train.get_context()
    print(
        f"worker {context.get_world_rank()} is rank {world.rank} of {world.size}: "
        f"losses {found[0]:.3f} to {found[-1]:.3f}, {worst:.1e} at most from the unsharded ones; "
        f"{calls} GEMM+AllReduce"
    )
    if worst > options["tolerance"] or found[-1] >= found[0] or world.size != options["workers"]:
        raise ValueError(f"rank {world.rank}: losses {found}, unsharded {expected}")
    ray.train.report({"loss": found[-1], "calls": calls, "ranks": world.size})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of a loss, absolute")
    parser.add_argument("--accelerator", default="streams")
    options = parser.parse_args()

    # As many CPUs as workers, however few the machine has; the data are no objects of Ray's store.
    ray.init(num_cpus=options.workers, include_dashboard=False, object_store_memory=80 << 20)
    with tempfile.TemporaryDirectory() as folder:
        trainer = ray.train.torch.TorchTrainer(
            work,
            train_loop_config=vars(options),
            scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
            run_config=RunConfig(storage_path=folder),
        )
        try:
            trainer.fit()  # raises where a worker did
        finally:
            ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
