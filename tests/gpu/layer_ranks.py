"""What ranks do in tests of layers on GPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import GELU, Linear, Module, Sequential

import mkernel
from mkernel.nn import ColumnParallelLinear, RowParallelLinear

TOKENS, HIDDEN, INNER = 512, 1024, 4096
STEPS = 4
"""Of one compiled step: CUDA graphs are recorded by the second or third."""

MODES: dict[str, Callable[[Module], Module]] = {
    "eager": lambda model: model,
    "aot_eager": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    "inductor": lambda model: torch.compile(model, fullgraph=True),
    "reduce-overhead": lambda model: torch.compile(model, fullgraph=True, mode="reduce-overhead"),
}


def trained(mode: str, sequence_parallel: bool, tokens: int = TOKENS) -> dict[str, float]:
    """Relative errors of the last of several steps against the unsharded layers in float64: the output,
    and the gradients of the input and of this rank's parts of the weights."""
    world = mkernel.world()
    torch.manual_seed(1)
    up, down = (
        Linear(*sizes, dtype=torch.bfloat16) for sizes in ((HIDDEN, INNER), (INNER, HIDDEN))
    )
    options = {"sequence_parallel": sequence_parallel}
    model = Sequential(
        ColumnParallelLinear.from_linear(up, **options),
        GELU(),
        RowParallelLinear.from_linear(down, **options),
    ).to("cuda")
    whole = Sequential(up, GELU(), down).double()
    run = MODES[mode](model)
    for step in range(STEPS):  # fresh inputs in each
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(step)).bfloat16()
        own = (x.chunk(world.size)[world.rank] if sequence_parallel else x).cuda().requires_grad_()
        model.zero_grad()
        torch.compiler.cudagraph_mark_step_begin()
        y = run(own)
        y.float().square().sum().backward()
        found = {"y": y.detach().double().cpu()}
    mkernel.synchronize()
    reference = x.double().requires_grad_()
    wanted = whole(reference)
    wanted.square().sum().backward()

    def part(tensor: Tensor, dimension: int = 0) -> Tensor:
        return tensor.chunk(world.size, dimension)[world.rank]

    def rows(tensor: Tensor) -> Tensor:
        return part(tensor) if sequence_parallel else tensor

    pairs = {
        "y": (found["y"], rows(wanted.detach())),
        "x": (own.grad, rows(reference.grad)),
        "up": (model[0].weight.grad, part(whole[0].weight.grad)),
        "down": (model[2].weight.grad, part(whole[2].weight.grad, 1)),
        "bias": (model[2].bias.grad, whole[2].bias.grad),
    }
    return {
        name: float((one.double().cpu() - other).norm() / other.norm())
        for name, (one, other) in pairs.items()
    }
