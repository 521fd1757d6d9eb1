"""MoE dispatch and combine as registered ops: gradients, capacity, padding, and what compilers make of
them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from ranks import close, drawn_ids, on_ranks, operand
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mkernel
from mkernel.errors import CapacityExceeded
from mkernel.plan.pipeline import Returns

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 3
TOKENS, HIDDEN, FEATURES, EACH, TOP_K = 10, 8, 16, 2, 3
EXPERTS = EACH * RANKS
MOST = RANKS * TOKENS * TOP_K
"""Rows that a rank can get."""
routed = partial(drawn_ids, experts=EXPERTS, tokens=TOKENS, top_k=TOP_K)


def inputs(rank: int) -> list[Tensor]:
    """x, w, topk_weights."""
    return [
        operand("x", rank, TOKENS, HIDDEN),
        operand("w", rank, EACH, HIDDEN, FEATURES),
        operand("weights", rank, TOKENS, TOP_K),
    ]


def layer(
    x: Tensor, ids: Tensor, w: Tensor, weights: Tensor, capacity: int | None = None
) -> Tensor:
    outputs, _, handle = mkernel.moe_dispatch_gemm(x, ids, w, capacity=capacity)
    return mkernel.moe_combine(outputs.sin(), handle, weights)


def gated(
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    weights: Tensor,
    capacity: int | None = None,
    returns: Returns | None = None,
) -> Tensor:
    """A layer whose second half multiplies too, by this rank's part of :func:`second`."""
    outputs, _, handle = mkernel.moe_dispatch_gemm(x, ids, w, capacity=capacity)
    return mkernel.moe_gemm_combine(outputs.sin(), second(w), handle, weights, returns=returns)


def activated(
    x: Tensor, ids: Tensor, w: Tensor, weights: Tensor, capacity: int | None = None
) -> Tensor:
    """A layer whose first half is activated by the op. Products are small: the loss is a sine, which
    makes more of their errors the larger they are."""
    sent = mkernel.moe_dispatch_gemm(x, ids, w / 4, capacity=capacity, activation="silu_and_mul")
    return mkernel.moe_combine(sent.outputs, sent.handle, weights)


def second(w: Tensor) -> Tensor:
    """[E, I, H], a function of ``w`` [E, H, I]."""
    return (w * 0.5).cos().transpose(1, 2)


def loss(out: Tensor, rank: int) -> Tensor:
    return (out * operand("loss", rank, *out.shape).to(out.dtype)).sin().sum()


LAYERS: dict[str, Callable[..., Tensor]] = {
    "plain": layer,
    "gated": gated,
    "gated by slots": partial(gated, returns="slots"),
    "gated by ranks": partial(gated, returns="ranks"),
    "activated": activated,
}


def expected(routing: str, *, kind: str) -> list[list[Tensor]]:
    """Each rank's out and gradients, in float64 and without ranks."""
    every = [[each.double().requires_grad_() for each in inputs(rank)] for rank in range(RANKS)]
    experts = torch.cat([w for _, w, _ in every])
    outs = []
    for rank, (x, _, weights) in enumerate(every):
        ids = routed(routing, rank)
        chosen = experts[ids.clamp(min=0)]
        rows = torch.einsum("th,tkhf->tkf", x, chosen)
        if kind == "activated":
            first, up = (rows / 4).chunk(2, dim=-1)
            rows = torch.nn.functional.silu(first) * up
        else:
            rows = rows.sin()
        if kind.startswith("gated"):
            rows = torch.einsum("tkf,tkfh->tkh", rows, second(experts)[ids.clamp(min=0)])
        outs.append(torch.einsum("tk,tkf->tf", weights * (ids >= 0), rows))
    torch.stack([loss(out, rank) for rank, out in enumerate(outs)]).sum().backward()
    return [
        [out.detach(), *(each.grad for each in own if each.grad is not None)]
        for out, own in zip(outs, every, strict=True)
    ]


def differentiated(routing: str, capacity: int | None, column: bool, kind: str) -> list[Tensor]:
    """A rank's out and gradients, which have the same bits in a second step."""
    first, again = (step(routing, capacity, column, kind) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    return first


def step(routing: str, capacity: int | None, column: bool, kind: str) -> list[Tensor]:
    rank = mkernel.world().rank
    x, w, weights = inputs(rank)
    if column:
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    given = [each.requires_grad_() for each in (x, w, weights)]
    out = LAYERS[kind](x, routed(routing, rank), w, weights, capacity)
    loss(out, rank).backward()
    return [out.detach(), *(each.grad for each in given if each.grad is not None)]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    ("routing", "capacity", "column"),
    [
        ("uniform", None, True),
        ("one expert", MOST, False),
        ("duplicates", None, False),
        ("padded", MOST + 5, False),
    ],
)
def test_gradients_are_those_of_the_unsharded_layer(
    routing: str, capacity: int | None, column: bool, kind: str
) -> None:
    results = on_ranks(differentiated, routing, capacity, column, kind, ranks=RANKS)
    wanted = expected(routing, kind=kind)
    for rank, (found, true) in enumerate(zip(results, wanted, strict=True)):
        for name, one, other in zip(("out", "dx", "dw", "dweights"), found, true, strict=True):
            close(one, other, 1e-5, f"rank {rank}, {name}")


# ---- capacity and padding ------------------------------------------------------------------------


def with_capacity(routing: str) -> list[str]:
    """What is wrong with a call whose capacity is just large enough, and with one row less."""
    world, found = mkernel.world(), []
    x, w, weights = inputs(world.rank)
    ids = routed(routing, world.rank)
    every = torch.cat([routed(routing, rank) for rank in range(RANKS)])
    owners = every[every >= 0] // EACH
    most = int(torch.bincount(owners, minlength=RANKS).max())
    truth = mkernel.moe_dispatch_gemm(x, ids, w)
    sent = mkernel.moe_dispatch_gemm(x, ids, w, capacity=most)
    rows = len(truth.outputs)
    if sent.outputs.shape != (most, FEATURES):
        found.append(f"shape {tuple(sent.outputs.shape)}")
    if not torch.equal(sent.outputs[:rows], truth.outputs) or sent.outputs[rows:].any():
        found.append("other rows")
    if not torch.equal(sent.counts, truth.counts):
        found.append("other counts")
    spoilt = sent.outputs.clone()
    spoilt[rows:] = float("nan")  # nobody's rows are not read
    weights = weights.masked_fill(ids < 0, float("nan"))
    wanted = mkernel.moe_combine(truth.outputs, truth.handle, weights.nan_to_num())
    if not torch.equal(mkernel.moe_combine(spoilt, sent.handle, weights), wanted):
        found.append("another combine")
    try:
        mkernel.moe_dispatch_gemm(x, ids, w, capacity=most - 1)
        if world.accelerator.name == "streams" or rows == most:
            found.append("nothing raised")
    except CapacityExceeded as error:
        if (error.rows, error.capacity) != (most, most - 1):
            found.append(str(error))
    again = mkernel.moe_combine(truth.outputs, truth.handle, weights)  # the world goes on
    if not torch.equal(again, wanted):
        found.append("another combine afterwards")
    return found


@pytest.mark.parametrize("accelerator", ["streams", "ascend"])
@pytest.mark.parametrize("routing", ["uniform", "padded"])
def test_capacity_bounds_the_rows(routing: str, accelerator: str) -> None:
    assert on_ranks(with_capacity, routing, ranks=RANKS, accelerator=accelerator) == [[]] * RANKS


def copied_handle() -> list[bool]:
    """Whether a copy of a handle is as good as the handle, one by one and after other dispatches."""
    rank = mkernel.world().rank
    x, w, weights = inputs(rank)
    found = []
    for routing in ("uniform", "padded"):
        outputs, _, handle = mkernel.moe_dispatch_gemm(x, routed(routing, rank), w)
        wanted = mkernel.moe_combine(outputs, handle, weights)
        copied = mkernel.MoeHandle(*(each.clone() for each in handle))
        mkernel.moe_dispatch_gemm(x, routed("one expert", rank), w)
        found.append(torch.equal(mkernel.moe_combine(outputs, copied, weights), wanted))
        other = mkernel.moe_dispatch_gemm(x, routed("duplicates", rank), w)
        other.handle.routing.copy_(handle.routing)  # what was known of it no longer holds
        found.append(torch.equal(mkernel.moe_combine(outputs, other.handle, weights), wanted))
    return found


@pytest.mark.parametrize("accelerator", ["streams", "ascend"])
def test_a_handle_is_its_tensors(accelerator: str) -> None:
    assert on_ranks(copied_handle, ranks=RANKS, accelerator=accelerator) == [[True] * 4] * RANKS


# ---- what compilers see --------------------------------------------------------------------------


def compiled(backend: str, capacity: int | None, kind: str) -> tuple[list[float], int]:
    """Relative differences of results and gradients from the eager ones; graphs made."""
    rank = mkernel.world().rank
    x, w, weights = (each.requires_grad_() for each in inputs(rank))
    ids = routed("uniform", rank)
    chosen = LAYERS[kind]
    eager = chosen(x, ids, w, weights, capacity)
    wanted = torch.autograd.grad(loss(eager, rank), (x, w, weights))
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend(backend)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=capacity is None):
        run = torch.compile(chosen, backend=graphs, fullgraph=True)
        got = run(x, ids, w, weights, capacity)
        found = torch.autograd.grad(loss(got, rank), (x, w, weights))
    pairs = zip((got, *found), (eager, *wanted), strict=True)
    return [float((x - y).norm() / y.norm()) for x, y in pairs], graphs.frame_count


@pytest.mark.parametrize(
    ("backend", "capacity", "kind"),
    [
        ("aot_eager", None, "gated"),
        ("inductor", MOST, "gated"),
        ("aot_eager", MOST, "activated"),
    ],
)
def test_a_layer_compiles_into_one_graph_with_the_same_results(
    backend: str, capacity: int | None, kind: str
) -> None:
    for differences, graphs in on_ranks(compiled, backend, capacity, kind, ranks=RANKS):
        assert graphs == 1
        assert max(differences) <= 1e-5
