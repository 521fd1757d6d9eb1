"""What ranks do in tests of compiled programs on GPUs whose collectives are torch's."""

from __future__ import annotations

from typing import Any

import torch
from nccl_ranks import over_nccl
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import mkernel

BATCH, SEQUENCE, HIDDEN, INNER = 4, 512, 1024, 4096


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z: Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return z


def styles(sequence_dim: int | None) -> dict[str, Any]:
    """torch's own; without sequence parallelism every rank has all of the activation."""
    if sequence_dim is None:
        return {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    split = Shard(sequence_dim)
    return {
        "norm": SequenceParallel(sequence_dim=sequence_dim),
        "gate": ColwiseParallel(input_layouts=split),
        "up": ColwiseParallel(input_layouts=split),
        "down": RowwiseParallel(output_layouts=split, use_local_output=False),
    }


def rewritten(
    folder: str, sequence_dim: int | None, mode: str | None
) -> tuple[dict[str, int], list[float]]:
    """What the pass rewrites of a model of parallelize_module; relative errors of output and gradients
    of the rewritten program against the program as it is."""
    with over_nccl(folder) as (rank, ranks):
        mesh = init_device_mesh("cuda", (ranks,))
        mkernel.init(mesh, accelerator="hopper", timeout_s=100)
        torch.manual_seed(0)
        model = GatedMlp().to("cuda", torch.bfloat16)
        parallelize_module(model, mesh, styles(sequence_dim))
        whole = torch.randn(BATCH, SEQUENCE, HIDDEN).to("cuda", torch.bfloat16)

        def step(run: Any) -> list[Tensor]:
            x: Tensor = whole.clone()
            if sequence_dim is not None:
                part = x.chunk(ranks, sequence_dim)[rank].contiguous()
                x = DTensor.from_local(part, mesh, [Shard(sequence_dim)])
            x.requires_grad_()
            model.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            y = run(x)
            y.float().square().sum().backward()
            found = [y.detach(), x.grad, *(each.grad for each in model.parameters())]
            return [
                (each.full_tensor() if isinstance(each, DTensor) else each).double().cpu()
                for each in found
                if each is not None
            ]

        wanted = step(model)
        uncached = config.patch(fx_graph_cache=False)
        with (
            mkernel.enable_async_tensor_parallel() as enabled,
            uncached,
            functorch_config.patch(enable_autograd_cache=False),
        ):
            run = torch.compile(model, fullgraph=True, mode=mode)
            for _ in range(4):  # CUDA graphs are recorded by the second or third
                found = step(run)
        mkernel.synchronize()
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
        return dict(enabled.report.rewritten), errors
