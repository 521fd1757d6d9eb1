"""What the GEMM ops take: strided matrices, activations of any dimensions, a bias, several b, DTensors.

Every form is compared with the unsharded product in float64, its gradients too. Copies stand in the
plan.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from operand_forms import (
    ACTIVATIONS,
    BACKENDS,
    FORMS,
    MATRICES,
    OPS,
    RANKS,
    Form,
    K,
    N,
    columns_of,
    differences,
    dims_of,
    drawn,
    expected,
    outermost,
    packed,
    transposed,
    weighed,
)
from python_calls import plans
from ranks import on_ranks
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mkernel
from mkernel.errors import ArgumentError
from mkernel.ops import all_gather_gemm, gemm_reduce_scatter
from mkernel.ops.gemm import GemmCall

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def called(name: str) -> list[str]:
    """What is wrong of each form's call: without gradients, with an ``out``, with gradients."""
    world, op, found = mkernel.world(), OPS[name], []
    public = getattr(mkernel, name)
    for label, form in FORMS.items():
        rank, wanted = world.rank, expected(op, form)
        a, b, bias = form.a(op, rank), form.b(rank), form.bias_of(op, rank)
        dims = dims_of(op, form)
        c = public(a, b, bias=bias, **dims)
        wrong = differences((c,), wanted[rank][:1], form.dtype)
        out = torch.full(tuple(c.shape), float("nan"), dtype=form.dtype)
        if public(a, b, bias=bias, out=out, **dims) is not out or not torch.equal(out, c):
            wrong += " out differs"
        plan = op.call(GemmCall(a, b, bias, form.dim if op.dim else 0)).plan
        copies = form.copies.get(world.backends.accelerator, ())
        if op.dim is None and form.lies is outermost:
            copies = ("a",)
        elif op.dim is None and form.batch and form.lies is packed:
            copies = ()
        elif op.dim is None and form.batch:  # of rows at one distance: as columns of a matrix
            copies = MATRICES["columns of a"].copies.get(world.backends.accelerator, ())
        if plan.copies != copies or (plan.bias is not None) is not form.bias:
            wrong += f" copies {plan.copies} of {copies}, bias {plan.bias}"
        inputs = [x for x in (a, b, bias) if x is not None]
        for x in inputs:
            x.requires_grad_()
        c = public(a, b, bias=bias, **dims)
        gradients = torch.autograd.grad(weighed(op, c, rank), inputs)
        wrong += differences((c.detach(), *gradients), wanted[rank], form.dtype)
        if wrong:
            found.append(f"{label}: {wrong}")
    return found


@pytest.mark.parametrize("accelerator", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_every_form_has_the_values_and_gradients_of_the_unsharded_product(
    op: str, accelerator: str
) -> None:
    assert on_ranks(called, op, accelerator=accelerator) == [[]] * RANKS


def gathers() -> list[str]:
    """A gathered A of more dimensions, given and returned."""
    rank, op, found = mkernel.world().rank, all_gather_gemm.OP, []
    for label, form in ACTIVATIONS.items():
        a = form.a(op, rank)
        wanted = torch.cat([form.a(op, r) for r in range(RANKS)], form.dim)
        into = torch.empty(wanted.shape)
        for given in (None, into):
            _, gathered = mkernel.all_gather_gemm(
                a, form.b(rank), gather_dim=form.dim, gathered=given, return_gathered=True
            )
            if not torch.equal(gathered, wanted) or given not in (None, gathered):
                found.append(label)
    return found


@pytest.mark.parametrize("accelerator", BACKENDS)
def test_the_gathered_activation_is_the_whole_one(accelerator: str) -> None:
    assert on_ranks(gathers, accelerator=accelerator) == [[]] * RANKS


# ---- several b -----------------------------------------------------------------------------------

WIDTHS = (8, N, 16, N)


def many(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    b = [drawn(f"b{at}", rank, K, width) for at, width in enumerate(WIDTHS)]
    bias = [drawn(f"bias{at}", rank, width) for at, width in enumerate(WIDTHS)]
    b[2], b[3] = transposed(b[2]), columns_of(b[3])
    return b, bias


def several(form: Form, with_bias: bool, options: dict[str, Any]) -> str:
    rank, op = mkernel.world().rank, all_gather_gemm.OP
    shards = [form.a(op, r).double().requires_grad_() for r in range(RANKS)]
    weights, losses = [], torch.zeros((), dtype=torch.float64)
    for r in range(RANKS):
        b, bias = ([x.double().requires_grad_() for x in each] for each in many(r))
        whole_a = torch.cat(shards, form.dim)
        c = [whole_a @ y + (z if with_bias else 0) for y, z in zip(b, bias, strict=True)]
        losses = losses + sum(weighed(op, each, r) for each in c)
        weights.append((b, bias, [each.detach() for each in c]))
    losses.backward()
    b, bias = many(rank)
    a = form.a(op, rank).requires_grad_()
    inputs = [a, *(x.requires_grad_() for x in b)]
    inputs += [x.requires_grad_() for x in bias] if with_bias else []
    c = mkernel.all_gather_gemm(
        a, b, bias=bias if with_bias else None, gather_dim=form.dim, **options
    )
    gathered = None
    if isinstance(c, tuple):
        c, gathered = c
    gradients = torch.autograd.grad(sum(weighed(op, each, rank) for each in c), inputs)
    with torch.no_grad():  # by no dispatcher, into given memory
        outs = [torch.empty_like(each) for each in c]
        again = mkernel.all_gather_gemm(
            a, b, bias=bias if with_bias else None, gather_dim=form.dim, out=outs
        )
    wrong = ""
    exact = weights[rank]
    if any(x is not y for x, y in zip(again, outs, strict=True)):
        wrong += "other outs; "
    if gathered is not None and not torch.equal(
        gathered, torch.cat([form.a(op, r) for r in range(RANKS)], form.dim)
    ):
        wrong += "gathered; "
    expected_gradients = [shards[rank].grad, *(x.grad for x in exact[0])]
    expected_gradients += [x.grad for x in exact[1]] if with_bias else []
    pairs = [*zip(c, exact[2], strict=True), *zip(again, exact[2], strict=True)]
    pairs += zip(gradients, expected_gradients, strict=True)
    for number, (one, other) in enumerate(pairs):
        assert other is not None
        if not float((one.detach().double() - other).norm() / other.norm()) < 2e-5:
            wrong += f"{number} of {len(pairs)}; "
    return wrong


@pytest.mark.parametrize("accelerator", BACKENDS)
def test_several_products_of_one_gather(accelerator: str) -> None:
    assert on_ranks(several_forms, accelerator=accelerator) == [[]] * RANKS


def several_forms() -> list[str]:
    options: list[dict[str, Any]] = [{}, {"return_gathered": True}, {"save_gathered": True}]
    found = []
    for label in ("packed", "[3, S, H]"):
        for with_bias in (False, True):
            for option in options:
                wrong = several(FORMS[label], with_bias, option)
                if wrong:
                    found.append(f"{label}, bias {with_bias}, {option}: {wrong}")
    return found


def launches() -> tuple[int, tuple[int, ...], int]:
    """Calls of the world for one list, and what its plan says."""
    rank = mkernel.world().rank
    with plans() as made:
        mkernel.all_gather_gemm(Form().a(all_gather_gemm.OP, rank), many(rank)[0])
    return len(made), made[0].products, made[0].launched


def test_several_products_are_one_launch_of_the_widest() -> None:
    assert on_ranks(launches) == [(1, WIDTHS, 1)] * RANKS


# ---- DTensors ------------------------------------------------------------------------------------


def sharded(x: Tensor, placement: Any) -> Any:
    from torch.distributed.tensor import DTensor, init_device_mesh

    return DTensor.from_local(x, init_device_mesh("cpu", (RANKS,)), [placement], run_check=False)


def dtensors(name: str) -> list[str]:
    from torch.distributed.tensor import Replicate, Shard

    world, op, found = mkernel.world(), OPS[name], []
    public, rank = getattr(mkernel, name), mkernel.world().rank
    for label in ("bias", "[2, 3, S, H]"):
        form = FORMS[label]
        dims = dims_of(op, form)
        a, b, bias = form.a(op, rank), form.b(rank), form.bias_of(op, rank)
        assert bias is not None
        last = a.dim() - 1
        fits = (Shard(form.dim), Shard(1), Shard(0)) if op.gathers else (
            Shard(last), Shard(0), Replicate()
        )  # fmt: skip
        wanted = expected(op, form)[rank]
        given = [sharded(x, p).requires_grad_() for x, p in zip((a, b, bias), fits, strict=True)]
        c = public(given[0], given[1], bias=given[2], **dims)
        if type(c) is not Tensor:
            found.append(f"{label}: C is a {type(c).__name__}")
        gradients = torch.autograd.grad(weighed(op, c, rank), given)
        if [g.placements for g in gradients] != [x.placements for x in given]:
            found.append(f"{label}: gradients are placed otherwise")
        local = [g.to_local() for g in gradients]
        wrong = differences((c.detach(), *local), wanted, form.dtype)
        found += [f"{label}: {wrong}"] if wrong else []
        for at, argument in enumerate(("a", "b", "bias")):
            other = Replicate() if fits[at] != Replicate() else Shard(0)
            changed = [x.detach() for x in given]
            changed[at] = sharded((a, b, bias)[at], other)
            try:
                public(changed[0], changed[1], bias=changed[2], **dims)
                found.append(f"{label}: {argument} placed {other} is taken")
            except ArgumentError as error:
                told = str(error)
                if error.argument != argument or f"placements=[{fits[at]!r}]".replace(
                    "dim=", ""
                ) not in told or ".to_local()" not in told:  # fmt: skip
                    found.append(f"{label}: {told}")
    assert world.size == RANKS
    return found


@pytest.mark.parametrize("op", OPS)
def test_dtensors_that_fit_are_unwrapped_and_others_refused(op: str) -> None:
    assert on_ranks(dtensors, op) == [[]] * RANKS


def of_other_ranks() -> str:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("x", "y"))
    a = DTensor.from_local(Form().a(all_gather_gemm.OP, 0), mesh["y"], [Shard(0)], run_check=False)
    try:
        mkernel.all_gather_gemm(a, Form().b(0))
    except ArgumentError as error:
        return str(error)
    return ""


def test_a_dtensor_of_other_ranks_is_refused() -> None:
    for error in on_ranks(of_other_ranks):
        assert "ranks of the group" in error
        assert error.startswith("a = ")


# ---- what is refused -----------------------------------------------------------------------------


def lies_differently() -> bool:
    """Ranks whose tensors lie otherwise make one call."""
    rank, op = mkernel.world().rank, gemm_reduce_scatter.OP
    form = (FORMS["packed"], FORMS["a and b"])[rank]
    c = mkernel.gemm_reduce_scatter(form.a(op, rank), form.b(rank))
    return not differences((c,), expected(op, FORMS["packed"])[rank][:1], torch.float32)


@pytest.mark.parametrize("accelerator", BACKENDS)
def test_strides_are_a_ranks_own(accelerator: str) -> None:
    assert on_ranks(lies_differently, accelerator=accelerator) == [True] * RANKS


# ---- what torch sees -----------------------------------------------------------------------------


def block(x: Tensor, up: list[Tensor], bias: list[Tensor], down: Tensor, shift: Tensor) -> Tensor:
    """An MLP on [B, S, H] with sequence parallelism, its two first weights on one gather."""
    left, right = mkernel.all_gather_gemm(x, up, bias=bias, gather_dim=1)
    return mkernel.gemm_reduce_scatter(left * right, down, bias=shift, scatter_dim=1)


def compiled() -> tuple[list[float], int]:
    """Greatest differences from the eager block, of the result and of gradients; graphs made."""
    rank = mkernel.world().rank
    form = ACTIVATIONS["[3, S, H]"]
    x = form.a(all_gather_gemm.OP, rank).requires_grad_()
    up = [columns_of(drawn(name, rank, K, N)).requires_grad_() for name in ("u", "v")]
    bias = [drawn(name, rank, N).requires_grad_() for name in ("w", "x")]
    down, shift = drawn("down", rank, N, K).requires_grad_(), drawn("s", 0, K).requires_grad_()
    inputs = [x, *up, *bias, down, shift]
    wanted = block(x, up, bias, down, shift)
    gradients = torch.autograd.grad(wanted.sin().sum(), inputs)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("inductor")
    got = torch.compile(block, backend=graphs, fullgraph=True)(x, up, bias, down, shift)
    found = torch.autograd.grad(got.sin().sum(), inputs)
    pairs = [(got.detach(), wanted.detach()), *zip(found, gradients, strict=True)]
    same = got.stride() == wanted.stride()
    return [float((x - y).abs().max()) if same else 99.0 for x, y in pairs], graphs.frame_count


def test_a_block_compiles_into_one_graph_with_the_same_results() -> None:
    for different, graphs in on_ranks(compiled):
        assert graphs == 1
        assert max(different) <= 1e-3


def compiled_dtensors() -> tuple[float, int]:
    from torch.distributed.tensor import Shard

    rank, op = mkernel.world().rank, all_gather_gemm.OP
    a, b = sharded(Form().a(op, rank), Shard(0)), sharded(Form().b(rank), Shard(1))

    def product(a: Tensor, b: Tensor) -> Tensor:
        return mkernel.all_gather_gemm(a, b)

    graphs = CompileCounterWithBackend("aot_eager")
    got = torch.compile(product, backend=graphs, fullgraph=True)(a, b)
    return float((got - product(a, b)).abs().max()), graphs.frame_count


def test_dtensors_are_unwrapped_in_a_compiled_graph() -> None:
    assert on_ranks(compiled_dtensors) == [(0.0, 1)] * RANKS
