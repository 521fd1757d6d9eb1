"""Gradients of the columns of one product: joined where they are computed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import silu

from mkernel.ops.columns import parts_of_columns

COLUMNS = (16, 16, 8)


def step(y: Tensor) -> Tensor:
    gate, up, more = parts_of_columns(y * 2, COLUMNS)
    return torch.cat([silu(gate) * up, more], -1).square().sum()


def expected(y: Tensor) -> Tensor:
    gate, up, more = torch.split(y * 2, COLUMNS, -1)
    return torch.cat([silu(gate) * up, more], -1).square().sum()


def gradient(function: object, y: Tensor) -> Tensor:
    assert callable(function)
    (found,) = torch.autograd.grad(function(y), y)
    return found


def test_compiled_gradients_are_joined_by_the_kernels_that_compute_them() -> None:
    y = torch.randn(6, sum(COLUMNS), dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(step, fullgraph=True)
    with config.patch(force_disable_caches=True):  # which do not know of lowerings
        found, code = run_and_get_code(lambda: gradient(compiled, y))
    torch.testing.assert_close(found, gradient(expected, y))
    assert len(code) == 2
    assert all("torch.ops.mkernel" not in each for each in code)


def test_joined_columns_have_derivatives() -> None:
    parts = [torch.randn(3, n, dtype=torch.float64, requires_grad=True) for n in COLUMNS]
    assert torch.autograd.gradcheck(lambda *each: torch.ops.mkernel.joined_columns([*each]), parts)


def test_second_derivatives_go_through_them_where_a_compiler_leaves_them_to_autograd() -> None:
    y = torch.randn(6, sum(COLUMNS), dtype=torch.float64, requires_grad=True)

    def second(function: object) -> Tensor:
        assert callable(function)
        first = torch.autograd.grad(function(y) + y.square().sum(), y, create_graph=True)
        return gradient(lambda _: first[0].square().sum(), y)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    torch.testing.assert_close(second(compiled), second(expected))
