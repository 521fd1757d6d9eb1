"""MoE dispatch without a product: rows beside those that dispatch+GEMM multiplies, handles that are
used again, e4m3 rows, gradients, and what compilers make of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import close, on_ranks, operand
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mkernel
from mkernel.backends.contracts.scaled import quantised_blocks
from mkernel.errors import ArgumentError, CapacityExceeded

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 3
TOKENS, HIDDEN, EACH, TOP_K = 10, 128, 2, 3
EXPERTS = EACH * RANKS
MOST = RANKS * TOKENS * TOP_K
"""Rows that a rank can get."""


def routed(rank: int, seed: int = 0) -> Tensor:
    """Ids some of which are none, and some twice a token's."""
    ids = torch.randint(
        EXPERTS, (TOKENS, TOP_K), generator=torch.Generator().manual_seed(rank + seed)
    )
    ids[::2, 1] = ids[::2, 0]
    ids[rank::4] = -1
    return ids


def everyone(name: str) -> list[Tensor]:
    return [operand(name, rank, TOKENS, HIDDEN) for rank in range(RANKS)]


def true_rows(x: list[Tensor], rank: int) -> Tensor:
    """The rows of a rank's experts in the documented order, one by one."""
    found = [
        x[source][token]
        for expert in range(rank * EACH, (rank + 1) * EACH)
        for source in range(RANKS)
        for token, ids in enumerate(routed(source).tolist())
        for each in ids
        if each == expert
    ]
    return torch.stack(found) if found else x[0][:0]


def as_its_product_has_them(capacity: int | None) -> list[str]:
    """What is wrong with rows, counts and handle beside those of dispatch+GEMM with unit weights."""
    rank, found = mkernel.world().rank, []
    x, ids = everyone("x")[rank], routed(rank)
    w = torch.eye(HIDDEN).repeat(EACH, 1, 1)
    weights = operand("weights", rank, TOKENS, TOP_K)
    for _ in range(3):  # calls that are known take another way
        sent = mkernel.moe_dispatch(x, ids, num_experts=EXPERTS, capacity=capacity)
        product = mkernel.moe_dispatch_gemm(x, ids, w, capacity=capacity)
        wanted = true_rows(everyone("x"), rank)
        rows = len(wanted)
        if not torch.equal(sent.rows[:rows], wanted) or sent.rows[rows:].any():
            found.append("other rows than by hand")
        if not torch.equal(sent.rows, product.outputs) or sent.scales is not None:
            found.append("other rows than of the product")
        if not torch.equal(sent.counts, product.counts):
            found.append("other counts")
        home = mkernel.moe_combine(sent.rows, sent.handle, weights)
        if not torch.equal(home, mkernel.moe_combine(sent.rows, product.handle, weights)):
            found.append("another way home")
    return found


@pytest.mark.parametrize("accelerator", ["streams", "ascend"])
@pytest.mark.parametrize("capacity", [None, MOST + 5])
def test_rows_are_those_that_the_product_multiplies(capacity: int | None, accelerator: str) -> None:
    results = on_ranks(as_its_product_has_them, capacity, ranks=RANKS, accelerator=accelerator)
    assert results == [[]] * RANKS


def exceeded() -> bool:
    world = mkernel.world()
    x, ids = everyone("x")[world.rank], torch.zeros(TOKENS, TOP_K, dtype=torch.int32)
    try:
        mkernel.moe_dispatch(x, ids, num_experts=EXPERTS, capacity=MOST - 1)
    except CapacityExceeded as error:
        return (error.rows, error.capacity) == (MOST, MOST - 1)
    return world.accelerator.name == "ascend" and world.rank != 0


@pytest.mark.parametrize("accelerator", ["streams", "ascend"])
def test_capacity_bounds_the_rows(accelerator: str) -> None:
    assert on_ranks(exceeded, ranks=RANKS, accelerator=accelerator) == [True] * RANKS


# ---- a routing that is used again ----------------------------------------------------------------


def used_again(capacity: int | None) -> list[str]:
    """What is wrong with rows of other tokens by handles of both dispatches, and by copies of them,
    alone and multiplied by unit weights; ids of the later calls say nothing."""
    rank, found = mkernel.world().rank, []
    x, other = everyone("x")[rank], everyone("other")[rank]
    w = torch.eye(HIDDEN).repeat(EACH, 1, 1)
    first = mkernel.moe_dispatch(x, routed(rank), num_experts=EXPERTS, capacity=capacity)
    product = mkernel.moe_dispatch_gemm(x, routed(rank), w, capacity=capacity)
    mkernel.moe_dispatch(x, routed(rank, 7), num_experts=EXPERTS)  # which leaves them as they are
    copied = mkernel.MoeHandle(*(each.clone() for each in first.handle))
    wanted = true_rows(everyone("other"), rank)
    nothing = torch.full((TOKENS, TOP_K), -1)
    for handle in (first.handle, product.handle, copied, first.handle):
        sent = mkernel.moe_dispatch(
            other, nothing, num_experts=EXPERTS, handle=handle, capacity=capacity
        )
        if not torch.equal(sent.rows[: len(wanted)], wanted) or sent.rows[len(wanted) :].any():
            found.append("other rows")
        if len(sent.rows) != (len(wanted) if capacity is None else capacity):
            found.append(f"{len(sent.rows)} rows")
        again = mkernel.moe_dispatch_gemm(other, nothing, w, handle=handle, capacity=capacity)
        if not torch.equal(again.outputs, sent.rows):
            found.append("other products")
        same = [sent.handle, again.handle], [sent.counts, again.counts]
        if any(each is not handle for each in same[0]) or any(
            each is not handle.counts for each in same[1]
        ):
            found.append("another handle")
    return found


@pytest.mark.parametrize("capacity", [None, MOST + 5])
def test_a_handle_is_a_routing_for_other_tokens(capacity: int | None) -> None:
    assert on_ranks(used_again, capacity, ranks=RANKS) == [[]] * RANKS


def wrong_handles() -> list[str]:
    rank = mkernel.world().rank
    x, ids = everyone("x")[rank], routed(rank)
    handle = mkernel.moe_dispatch(x, ids, num_experts=EXPERTS).handle
    calls: list[dict[str, Any]] = [
        {"num_experts": EXPERTS + RANKS, "handle": handle},
        {"num_experts": EXPERTS, "handle": handle, "capacity": MOST},
        {"num_experts": EXPERTS, "handle": tuple(handle)},
    ]
    found = [refused(mkernel.moe_dispatch, x, ids, **options) for options in calls]
    for w, options in ((EACH + 1, calls[0]), (EACH, calls[1]), (EACH, calls[2])):
        given = {name: each for name, each in options.items() if name != "num_experts"}
        wrong = refused(mkernel.moe_dispatch_gemm, x, ids, torch.ones(w, HIDDEN, 8), **given)
        found.append(wrong)
    return [each.argument for each in found]


def refused(op: Any, *given: Tensor, **options: Any) -> ArgumentError:
    with pytest.raises(ArgumentError) as caught:
        op(*given, **options)
    return caught.value


def test_wrong_handles_are_refused_by_name() -> None:
    results = on_ranks(wrong_handles, ranks=RANKS)
    assert results == [["num_experts", "capacity", "handle", "w", "capacity", "handle"]] * RANKS


def refused_handles() -> list[str]:
    rank = mkernel.world().rank
    x, ids, w = everyone("x")[rank], routed(rank), torch.ones(EACH, HIDDEN, 8)
    handle = mkernel.moe_dispatch(x, ids, num_experts=EXPERTS).handle
    return [
        str(refused(mkernel.moe_dispatch, x, ids, num_experts=EXPERTS, handle=handle)),
        str(refused(mkernel.moe_dispatch_gemm, x, ids, w, handle=handle)),
    ]


def test_ascend_uses_no_routing_again() -> None:
    for texts in on_ranks(refused_handles, ranks=RANKS, accelerator="ascend"):
        assert all("handle = of an earlier dispatch" in text for text in texts)


# ---- e4m3 ----------------------------------------------------------------------------------------


def quantised(capacity: int | None) -> list[str]:
    """What is wrong with rows that are quantised on the way, and with those that were before."""
    rank, found = mkernel.world().rank, []
    every = [each.bfloat16() for each in everyone("x")]
    pairs = [quantised_blocks(each) for each in every]
    wanted = true_rows([values.view(torch.int8) for values, _ in pairs], rank)
    scales = true_rows([scale for _, scale in pairs], rank)
    x, scale = pairs[rank]
    options = {"num_experts": EXPERTS, "capacity": capacity}
    for sent in (
        mkernel.moe_dispatch(every[rank], routed(rank), quantise="block", **options),
        mkernel.moe_dispatch(x, routed(rank), x_scale=scale, **options),
    ):
        assert sent.scales is not None
        count = len(wanted)
        if sent.rows.dtype != torch.float8_e4m3fn or sent.scales.shape != (len(sent.rows), 1):
            found.append("another form")
        if not torch.equal(sent.rows[:count].view(torch.int8), wanted):
            found.append("other rows")
        if not torch.equal(sent.scales[:count], scales) or (sent.scales[count:] != 1).any():
            found.append("other scales")
        if sent.rows[count:].float().any():
            found.append("rows behind the last")
    return found


@pytest.mark.parametrize("capacity", [None, MOST + 5])
def test_e4m3_rows_come_with_their_scales(capacity: int | None) -> None:
    assert on_ranks(quantised, capacity, ranks=RANKS) == [[]] * RANKS


def multiplied_again(capacity: int | None) -> bool:
    """Whether e4m3 experts make the same of other tokens by a handle and by ids."""
    rank = mkernel.world().rank
    x, ids = everyone("x")[rank].bfloat16(), routed(rank)
    w, scale = quantised_blocks(operand("w", rank, EACH * 2 * HIDDEN, HIDDEN))
    options: dict[str, Any] = {
        "w_scale": scale.view(EACH, 2, HIDDEN, 1)[:, :, 0].transpose(1, 2).contiguous(),
        "activation": "silu_and_mul", "quantise": "block", "capacity": capacity,
    }  # fmt: skip
    experts = w.view(EACH, 2 * HIDDEN, HIDDEN).transpose(1, 2)
    first = mkernel.moe_dispatch_gemm(x.flip(0), ids, experts, **options)
    wanted = mkernel.moe_dispatch_gemm(x, ids, experts, **options)
    nothing = torch.full_like(ids, -1)
    found = mkernel.moe_dispatch_gemm(x, nothing, experts, handle=first.handle, **options)
    same = [
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(found[:2], wanted[:2], strict=True)
    ]
    return all(same) and found.handle is first.handle


@pytest.mark.parametrize("capacity", [None, MOST + 5])
def test_e4m3_experts_take_a_handle(capacity: int | None) -> None:
    assert on_ranks(multiplied_again, capacity, ranks=RANKS) == [True] * RANKS


# ---- gradients and compilers ---------------------------------------------------------------------


def layer(x: Tensor, ids: Tensor, w: Tensor, weights: Tensor, capacity: int | None) -> Tensor:
    """Experts of the user's own, for two more dispatches of the same routing too."""
    sent = mkernel.moe_dispatch(x, ids, num_experts=EXPERTS, capacity=capacity)
    again = mkernel.moe_dispatch(
        x.sin(), ids, num_experts=EXPERTS, handle=sent.handle, capacity=capacity
    )
    nothing, unit = torch.full_like(ids, -1), torch.eye(HIDDEN).repeat(len(sent.counts), 1, 1)
    product = mkernel.moe_dispatch_gemm(
        x.cos(), nothing, unit, handle=sent.handle, capacity=capacity
    )
    ends = sent.counts.cumsum(0)
    expert = torch.searchsorted(ends, torch.arange(len(sent.rows)), right=True)
    own = w[expert.clamp(max=EACH - 1)]
    made = torch.einsum("rh,rh->rh", sent.rows + 2 * again.rows + 3 * product.outputs, own)
    return mkernel.moe_combine(made, sent.handle, weights)


def inputs(rank: int) -> list[Tensor]:
    """x, w [E/W, H], topk_weights."""
    names = (("x", TOKENS, HIDDEN), ("w", EACH, HIDDEN), ("weights", TOKENS, TOP_K))
    return [operand(name, rank, *shape) for name, *shape in names]


def loss(out: Tensor, rank: int) -> Tensor:
    return (out * operand("loss", rank, *out.shape).to(out.dtype)).sum()


def differentiated(capacity: int | None) -> list[Tensor]:
    rank = mkernel.world().rank
    given = [each.requires_grad_() for each in inputs(rank)]
    x, w, weights = given
    out = layer(x, routed(rank), w, weights, capacity)
    return [out.detach(), *torch.autograd.grad(loss(out, rank), given)]


def true_gradients() -> list[list[Tensor]]:
    """Each rank's out and gradients, in float64 and without ranks."""
    every = [[each.double().requires_grad_() for each in inputs(rank)] for rank in range(RANKS)]
    experts = torch.cat([w for _, w, _ in every])
    outs, losses = [], []
    for rank, (x, _, weights) in enumerate(every):
        ids = routed(rank)
        both = (x + 2 * x.sin() + 3 * x.cos())[:, None] * experts[ids.clamp(min=0)]
        outs.append(torch.einsum("tk,tkh->th", weights * (ids >= 0), both))
        losses.append(loss(outs[-1], rank))
    flat = [each for own in every for each in own]
    found = iter(torch.autograd.grad(torch.stack(losses).sum(), flat))
    return [[out.detach(), *(next(found) for _ in range(3))] for out in outs]


@pytest.mark.parametrize("capacity", [None, MOST + 5])
def test_gradients_are_those_of_the_unsharded_layer(capacity: int | None) -> None:
    results = on_ranks(differentiated, capacity, ranks=RANKS)
    for rank, (found, true) in enumerate(zip(results, true_gradients(), strict=True)):
        for name, one, other in zip(("out", "dx", "dw", "dweights"), found, true, strict=True):
            close(one, other, 1e-5, f"rank {rank}, {name}")


def compiled() -> tuple[list[bool], int]:
    rank = mkernel.world().rank
    given = [each.requires_grad_() for each in inputs(rank)]
    x, w, weights = given
    eager = layer(x, routed(rank), w, weights, MOST)
    wanted = torch.autograd.grad(loss(eager, rank), given)
    counter = CompileCounterWithBackend("aot_eager")
    made = torch.compile(layer, backend=counter, fullgraph=True)
    out = made(x, routed(rank), w, weights, MOST)
    found = torch.autograd.grad(loss(out, rank), given)
    same = [torch.allclose(a, b) for a, b in zip((out, *found), (eager, *wanted), strict=True)]
    return same, counter.frame_count


def test_a_compiled_layer_is_one_graph() -> None:
    assert on_ranks(compiled, ranks=2) == [([True] * 4, 1)] * 2
