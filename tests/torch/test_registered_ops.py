"""The ops that torch knows: schemas, fake kernels, derivatives, and what compilers make of them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from ranks import on_ranks, operand
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import mkernel
from mkernel.errors import ArgumentError
from mkernel.world.world import World

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
RANKS = 2
M, K, N = 8, 16, 24
"""M counts all rows where they are split over the ranks; K and N are one rank's where these are."""


# ---- gradients -----------------------------------------------------------------------------------


def operands(op: str, rank: int) -> tuple[Tensor, Tensor]:
    rows = M // RANKS if op == "all_gather_gemm" else M
    return operand("a", rank, rows, K), operand("b", rank, K, N)


def weighed(c: Tensor, rank: int) -> Tensor:
    """Return a rank's loss."""
    return (c * operand("weights", rank, *c.shape).to(c.dtype)).sin().sum()


def gathered_differentiated() -> tuple[Tensor, Tensor]:
    world = mkernel.world()
    a, b = operands("all_gather_gemm", world.rank)
    a.requires_grad_()
    c, gathered = mkernel.all_gather_gemm(a, b, return_gathered=True)
    both = weighed(c, world.rank) + weighed(gathered, 7)
    (of_both,) = torch.autograd.grad(both, a, retain_graph=True)
    (of_gathered,) = torch.autograd.grad(weighed(gathered, 7), a)
    return of_both, of_gathered


def test_the_gathered_tensor_has_a_gradient_of_its_own() -> None:
    a = [operands("all_gather_gemm", rank)[0].double().requires_grad_() for rank in range(RANKS)]
    b = [operands("all_gather_gemm", rank)[1].double() for rank in range(RANKS)]
    whole_a = torch.cat(a)
    of_gathered = RANKS * weighed(whole_a, 7)
    of_c = sum(weighed(whole_a @ b[rank], rank) for rank in range(RANKS))
    alone = torch.autograd.grad(of_gathered, a, retain_graph=True)
    both = torch.autograd.grad(of_gathered + of_c, a)
    for rank, (found_both, found_alone) in enumerate(on_ranks(gathered_differentiated)):
        torch.testing.assert_close(found_both.double(), both[rank], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found_alone.double(), alone[rank], rtol=1e-4, atol=1e-4)


def of_a_kept_gather(options: dict[str, Any]) -> Tensor:
    """Return the gradient of b, which is a product with the gathered A."""
    rank = mkernel.world().rank
    a, b = operands("all_gather_gemm", rank)
    c = mkernel.all_gather_gemm(a, b.requires_grad_(), **options)
    return torch.autograd.grad(weighed(c[0] if isinstance(c, tuple) else c, rank), b)[0]


@pytest.mark.parametrize("option", ["save_gathered", "return_gathered"])
def test_a_gather_that_is_kept_is_the_right_one(option: str) -> None:
    whole = torch.cat([operands("all_gather_gemm", rank)[0].double() for rank in range(RANKS)])
    for rank, found in enumerate(on_ranks(of_a_kept_gather, {option: True})):
        b = operands("all_gather_gemm", rank)[1].double().requires_grad_()
        (wanted,) = torch.autograd.grad(weighed(whole @ b, rank), b)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def keeps() -> list[list[tuple[int, ...]]]:
    """Shapes that each way of gathering saves for the backward."""
    found = []
    for options in ({}, {"save_gathered": True}):
        saved: list[tuple[int, ...]] = []
        a, b = (each.requires_grad_() for each in operands("all_gather_gemm", mkernel.world().rank))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.append(tuple(tensor.shape)) or tensor,
            lambda tensor: tensor,
        ):
            mkernel.all_gather_gemm(a, b, **options)
        found.append(saved)
    return found


def test_the_gathered_tensor_is_kept_only_where_asked_for() -> None:
    for again, kept in on_ranks(keeps):
        assert (M, K) not in again
        assert (M, K) in kept


def overwrites(op: str) -> str:
    a, b = (each.requires_grad_() for each in operands(op, mkernel.world().rank))
    try:
        getattr(mkernel, op)(a, b, out=torch.empty(1))
    except ArgumentError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("op", OPS)
def test_an_output_of_the_callers_has_no_gradient(op: str) -> None:
    for error in on_ranks(overwrites, op):
        assert "requires grad" in error
        assert "out" in error


# ---- what compilers see --------------------------------------------------------------------------

REGISTERED = [*OPS, "all_gather_gemm_gathered", "all_gather_rows", "replicated_gemm"]


def checks(op: str, world: World) -> dict[str, str]:
    rows = operands("all_gather_gemm" if "gather" in op else op, world.rank)
    arguments = tuple(each.requires_grad_() for each in rows)
    done = opcheck(getattr(torch.ops.mkernel, op).default, arguments, {"group": world.name})
    return dict(done)


def checked_everywhere() -> dict[str, dict[str, str]]:
    world = mkernel.world()
    assert mkernel.all_gather_gemm  # registers the ops
    return {op: checks(op, world) for op in REGISTERED}


def test_torch_finds_nothing_wrong_with_any_registered_op() -> None:
    for found in on_ranks(checked_everywhere):
        assert list(found) == REGISTERED
        for op, outcome in found.items():
            assert set(outcome.values()) == {"SUCCESS"}, (op, outcome)


def layer(a: Tensor, b: Tensor, down: Tensor) -> Tensor:
    """Without pointwise operations, for which Inductor starts a C++ compiler."""
    return mkernel.gemm_reduce_scatter(mkernel.all_gather_gemm(a, b), down)


def compiled() -> tuple[float, list[float], int]:
    """Greatest differences from the eager layer, of the result and of gradients; graphs made."""
    world = mkernel.world()
    a, b = operands("all_gather_gemm", world.rank)
    down = operand("down", world.rank, N, K)
    inputs = [each.requires_grad_() for each in (a, b, down)]
    wanted = layer(*inputs)
    gradients = torch.autograd.grad(wanted.sin().sum(), inputs)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("inductor")
    got = torch.compile(layer, backend=graphs, fullgraph=True)(*inputs)
    found = torch.autograd.grad(got.sin().sum(), inputs)
    differences = [float((x - y).abs().max()) for x, y in zip(found, gradients, strict=True)]
    return float((got - wanted).detach().abs().max()), differences, graphs.frame_count


def test_a_layer_compiles_into_one_graph_with_the_same_results() -> None:
    for difference, gradients, graphs in on_ranks(compiled):
        assert graphs == 1
        assert difference <= 1e-5
        assert max(gradients) <= 1e-4


def unused(a: Tensor, b: Tensor, used: bool) -> tuple[Tensor, ...]:
    first = mkernel.all_gather_gemm(a, b)
    second = mkernel.all_gather_gemm(a, b)
    mkernel.gemm_all_reduce(a, b)
    return (first, second) if used else (a @ b,)


def counted(backend: str) -> int:
    """Calls of the world in one call of a compiled function, whose results only rank 0 uses."""
    world = mkernel.world()
    a, b = operands("all_gather_gemm", world.rank)
    torch._dynamo.reset()
    function = torch.compile(unused, backend=backend, fullgraph=True)
    function(a, b, world.rank == 0)
    with mock.patch.object(World, "run", autospec=True, side_effect=World.run) as run:
        function(a, b, world.rank == 0)
    return run.call_count


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_no_call_is_removed_or_merged(backend: str) -> None:
    assert on_ranks(counted, backend) == [3] * RANKS


def exported() -> tuple[float, bool]:
    class Layer(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor, down: Tensor) -> Tensor:
            return layer(a, b, down)

    world = mkernel.world()
    a, b = operands("all_gather_gemm", world.rank)
    arguments = (a, b, operand("down", world.rank, N, K))
    program = torch.export.export(Layer(), arguments)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    difference = (program.module()(*arguments) - layer(*arguments)).abs().max()
    return float(difference), any("mkernel" in name for name in names)


def test_a_layer_can_be_exported() -> None:
    for difference, has_ops in on_ranks(exported):
        assert difference == 0
        assert has_ops
