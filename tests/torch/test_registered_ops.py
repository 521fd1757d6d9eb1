"""The ops that torch knows: schemas, fake kernels, derivatives, and what compilers make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from python_calls import plans
from ranks import checked, on_ranks, operand
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mkernel

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
    own = (M // RANKS, K)
    for again, kept in on_ranks(keeps):
        assert own in again
        assert (M, K) not in again
        assert (M, K) in kept
        assert own not in kept


# ---- what compilers see --------------------------------------------------------------------------

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""An op's name, its arguments and options."""
_WITHOUT_SUMS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""The tests of opcheck for e4m3: its test of the schema adds these tensors up, which torch cannot."""


def given(name: str, *shape: int) -> Tensor:
    return operand(name, mkernel.world().rank, *shape).requires_grad_()


def gemm_calls() -> Iterator[Call]:
    for op in (*OPS, "all_gather_gemm_gathered", "all_gather_rows", "replicated_gemm"):
        rows = operands("all_gather_gemm" if "gather" in op else op, mkernel.world().rank)
        yield op, tuple(each.requires_grad_() for each in rows), {}
    x, b, bias = given("x", 3, M, K), given("b", K, N), given("bias", N)
    yield "all_gather_gemm", (x, b, bias), {"gather_dim": 1}
    yield "gemm_reduce_scatter", (x, b, bias), {"scatter_dim": 1}
    yield "all_gather_gemms", (x, [b, given("c", K, M)], []), {"gather_dim": 1}


def sum_calls() -> Iterator[Call]:
    x, b, weight, residual = given("x", M, K), given("b", K, N), given("w", N), given("r", M, N)
    yield "all_reduce", (x,), {}
    yield "all_reduce_norm", (residual, weight, given("s", M, N)), {"eps": 2.0}
    yield "gemm_all_reduce_norm", (x, b, weight, residual), {"eps": 2.0}
    left, right = (given(name, 2 * M, 128).detach().to(torch.float8_e4m3fn) for name in "lr")
    one = torch.ones(1)
    for op in OPS:
        yield f"{op}_scaled", (left, right.t(), one, one), {}
    columns = torch.ones(2 * M).bfloat16()
    given_all = (left, right.t(), columns, None, None, one, one)
    yield "gemm_all_reduce_norm_scaled", given_all, {}
    yield "gemm_all_reduce_norm_quantised", given_all, {}
    yield "all_reduce_norm_quantised", (residual.detach(), weight.detach()), {}
    yield "all_gather_gemms_scaled", (left, [right.t()], one, [one], []), {}


def expert_calls() -> Iterator[Call]:
    ops, group = torch.ops.mkernel, mkernel.world().name
    ids = torch.tensor([[0, 3], [1, -1], [2, 2]])
    x, w, weights = given("x", 3, K), given("w", 2, K, N), given("weights", 3, 2)
    w2 = given("w2", 2, N, M)
    for capacity in (None, 12):
        options = {"capacity": capacity}
        yield "moe_dispatch_gemm", (x, ids, w), {**options, "activation": "silu_and_mul"}
        plain = (x.detach(), ids, w.detach())
        outputs, *handle = ops.moe_dispatch_gemm(*plain, **options, group=group)
        yield "moe_dispatch_gemm", (x, ids, w, *handle), options
        yield "moe_dispatch_backward", (outputs, *plain[::2], *handle), {"top_k": 2, **options}
        rows = outputs.requires_grad_()
        yield "moe_combine", (rows, *handle, weights), {}
        yield "moe_gemm_combine", (rows, w2, *handle, weights), {"returns": "ranks"}
    still = [each.detach() for each in (rows, w2, weights)]
    home = given("home", 3, N).detach(), given("gemm home", 3, M).detach()
    yield "moe_combine_backward", (home[0], still[0], *handle, still[2]), {}
    yield "moe_gemm_combine_backward", (home[1], *still[:2], *handle, still[2]), {}


def attention_calls() -> Iterator[Call]:
    """Make calls on tensors that lie by heads and by positions, with and without documents."""
    heads = [given(name, 2, n, M, 8) for name, n in (("q", 4), ("k", 2), ("v", 2))]
    turned = [each.detach().transpose(1, 2).contiguous().transpose(1, 2) for each in heads]
    documents = torch.tensor([0, 1, 5, 5, 2 * M], dtype=torch.int32)
    yield "ring_attention", (*heads, documents), {"causal": True, "scale": 0.4}
    out, lse = mkernel.ring_attention(*turned, causal=True, return_lse=True)
    assert out.stride() == turned[0].stride()
    yield "ring_attention_backward", (out, lse, *turned, None, out, lse), {"causal": True}
    yield "ring_attention", tuple(each.requires_grad_() for each in turned), {"causal": True}


FAMILIES = (gemm_calls, sum_calls, expert_calls, attention_calls)


def checked_everywhere(family: Callable[[], Iterator[Call]]) -> dict[str, dict[str, str]]:
    assert mkernel.all_gather_gemm  # registers the ops
    return {
        f"{number}, {name} {options}": checked(
            getattr(torch.ops.mkernel, name),
            arguments,
            tests=_WITHOUT_SUMS if name.endswith(("scaled", "quantised")) else None,
            **options,
        )
        for number, (name, arguments, options) in enumerate(family())
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_finds_nothing_wrong_with_any_registered_op(
    family: Callable[[], Iterator[Call]],
) -> None:
    """More forms of each op, in a world of one, are in tests/unit/ops/test_fakes_alone.py."""
    for found in on_ranks(checked_everywhere, family):
        assert found
        assert not any(found.values()), found


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
    with plans() as made:
        function(a, b, world.rank == 0)
    return len(made)


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
