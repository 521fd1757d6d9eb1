"""Tensor-parallel layers have the results and the gradients of the unsharded ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from torch.nn import Linear, Module, Sequential

import mkernel
from mkernel.nn import ColumnParallelLinear, RowParallelLinear

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
BATCH, SEQUENCE, HIDDEN, INNER = 3, 8, 12, 20


def unsharded(bias: bool) -> Sequential:
    torch.manual_seed(5)
    return Sequential(
        Linear(HIDDEN, INNER, bias=bias), torch.nn.GELU(), Linear(INNER, HIDDEN, bias=bias)
    )


def tokens() -> Tensor:
    """Of all ranks, [sequence, batch, hidden]."""
    return torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(6))


class Parallel(Module):
    def __init__(self, whole: Sequential, sequence_parallel: bool) -> None:
        super().__init__()
        first, second = whole[0], whole[2]
        assert isinstance(first, Linear)
        assert isinstance(second, Linear)
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel}
        self.first = ColumnParallelLinear.from_linear(first, **options)
        self.second = RowParallelLinear.from_linear(second, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.nn.functional.gelu(self.first(x)))
        return y


def trained(bias: bool, sequence_parallel: bool, compiled: bool) -> dict[str, Tensor]:
    """A rank's output, its part of the input's gradient, and its parameters' gradients."""
    world = mkernel.world()
    model = Parallel(unsharded(bias), sequence_parallel)
    x = tokens()
    if sequence_parallel:
        x = x.chunk(world.size)[world.rank].contiguous()
    x.requires_grad_()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    y = run(x)
    y.square().sum().backward()
    assert x.grad is not None
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **found}


def part(whole: Tensor, dimension: int, rank: int) -> Tensor:
    return whole.chunk(RANKS, dimension)[rank]


@pytest.mark.parametrize(
    ("bias", "sequence_parallel", "compiled"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_a_pair_of_layers_is_the_unsharded_one(
    bias: bool, sequence_parallel: bool, compiled: bool
) -> None:
    whole = unsharded(bias).double()
    x = tokens().double().requires_grad_()
    y = whole(x)
    y.square().sum().backward()
    results = on_ranks(trained, bias, sequence_parallel, compiled)
    splits = {"first.weight": 0, "first.bias": 0, "second.weight": 1, "second.bias": None}
    gradients = dict(zip(splits, [p.grad for p in whole.parameters()], strict=False))
    if not bias:
        gradients = {"first.weight": whole[0].weight.grad, "second.weight": whole[2].weight.grad}
    for rank, found in enumerate(results):
        wanted = {"y": y.detach(), "x": x.grad}
        if sequence_parallel:
            wanted = {name: part(each, 0, rank) for name, each in wanted.items()}
        for name, gradient in gradients.items():
            split = splits[name]
            wanted[name] = gradient if split is None else part(gradient, split, rank)
        assert found.keys() == wanted.keys()
        for name, each in wanted.items():
            torch.testing.assert_close(
                found[name].double(), each, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
