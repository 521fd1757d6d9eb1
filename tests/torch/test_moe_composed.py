"""Derivatives of the MoE ops on an accelerator that has no calls of them, beside float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import drawn_ids, on_ranks, operand
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import mkernel
from mkernel.backends.accelerators.streams import StreamsAccelerator
from mkernel.errors import Unsupported
from mkernel.ops import moe_composed
from mkernel.ops.registration import ops
from mkernel.plan.capabilities import AcceleratorCapabilities

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("leaves_nothing"),
    pytest.mark.skipif(
        torch.__version__ < moe_composed._LEAST_TORCH, reason="its grouped product may hang"
    ),
]

RANKS = 3
TOKENS, HIDDEN, FEATURES, EACH, TOP_K = 10, 32, 24, 2, 3
EXPERTS = EACH * RANKS
MOST = RANKS * TOKENS * TOP_K
"""Rows that a rank can get."""
routed = partial(drawn_ids, experts=EXPERTS, tokens=TOKENS, top_k=TOP_K)
ROUTINGS = ("uniform", "one expert", "duplicates", "padded")


class WithoutDerivatives(StreamsAccelerator):
    """``streams`` without calls of gradients, as ``hopper`` is."""

    name = "without-derivatives"

    def __init__(self) -> None:
        super().__init__("cpu")

    def capabilities(self) -> AcceleratorCapabilities:
        """Return the claims of ``streams`` without these ops."""
        claims = super().capabilities()
        kept = tuple(op for op in claims.ops if not op.endswith("_backward"))
        return claims.model_copy(update={"ops": kept})


ALONE = f"{__name__}:WithoutDerivatives"


def drawn(name: str, rank: int, *shape: int) -> Tensor:
    return operand(name, rank, *shape, dtype=torch.bfloat16)


def places(routing: str, owner: int) -> list[tuple[int, int, int, int]]:
    """Return (own expert, source, token, slot) of each row of a rank, in the documented order."""
    return [
        (expert, source, token, slot)
        for expert in range(EACH)
        for source in range(RANKS)
        for token, ids in enumerate(routed(routing, source).tolist())
        for slot, each in enumerate(ids)
        if each == owner * EACH + expert
    ]


def given_rows(name: str, routing: str, owner: int, width: int) -> Tensor:
    return drawn(name, owner, len(places(routing, owner)), width)


def weights_of(rank: int) -> Tensor:
    return operand("weights", rank, TOKENS, TOP_K)


def laid_out(w: Tensor, column: bool) -> Tensor:
    return w.transpose(1, 2).contiguous().transpose(1, 2) if column else w


def true_dispatch(routing: str, rank: int) -> list[Tensor]:
    """The gradients of x and w of a rank, one row after the other."""
    of_x = torch.zeros(TOKENS, HIDDEN).double()
    of_w = torch.zeros(EACH, HIDDEN, FEATURES).double()
    for owner in range(RANKS):
        gradients = given_rows("dy", routing, owner, FEATURES).double()
        w = drawn("w", owner, EACH, HIDDEN, FEATURES).double()
        for dy, (expert, source, token, _) in zip(gradients, places(routing, owner), strict=True):
            if source == rank:
                of_x[token] += w[expert] @ dy
            if owner == rank:
                x = drawn("x", source, TOKENS, HIDDEN)[token].double()
                of_w[expert] += torch.outer(x, dy)
    return [of_x, of_w]


def true_combines(routing: str, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of y and weights, and of h, w2 and weights, of a rank."""
    own = len(places(routing, rank))
    of_y, of_h = (torch.zeros(own, width).double() for width in (HIDDEN, FEATURES))
    of_w2 = torch.zeros(EACH, FEATURES, HIDDEN).double()
    of_weights, of_both = (torch.zeros(TOKENS, TOP_K).double() for _ in range(2))
    for owner in range(RANKS):
        y, h = (
            given_rows(name, routing, owner, width).double()
            for name, width in (("y", HIDDEN), ("h", FEATURES))
        )
        w2 = drawn("w2", owner, EACH, FEATURES, HIDDEN).double()
        for row, (expert, source, token, slot) in enumerate(places(routing, owner)):
            dout = drawn("dout", source, TOKENS, HIDDEN)[token].double()
            weight = weights_of(source)[token, slot].double()
            if source == rank:
                of_weights[token, slot] = dout @ y[row]
                of_both[token, slot] = (w2[expert] @ dout) @ h[row]
            if owner == rank:
                of_y[row] = weight * dout
                of_h[row] = weight * (w2[expert] @ dout)
                of_w2[expert] += weight * torch.outer(h[row], dout)
    return [of_y, of_weights], [of_h, of_w2, of_both]


def found_gradients(routing: str, capacity: int | None, column: bool) -> dict[str, list[Tensor]]:
    """This rank's gradients by each of the three ops. Rows that are nobody's are NaN, and so are the
    weights of slots without an expert."""
    world = mkernel.world()
    rank, group = world.rank, world.name
    w = laid_out(drawn("w", rank, EACH, HIDDEN, FEATURES), column)
    w2 = laid_out(drawn("w2", rank, EACH, FEATURES, HIDDEN), column)
    x, ids, dout = (
        drawn("x", rank, TOKENS, HIDDEN),
        routed(routing, rank),
        drawn("dout", rank, TOKENS, HIDDEN),
    )
    weights = weights_of(rank).masked_fill(ids < 0, float("nan"))
    sent = mkernel.moe_dispatch_gemm(x, ids, w, capacity=capacity)

    def padded(name: str, width: int) -> Tensor:
        own = given_rows(name, routing, rank, width)
        rows = own.new_full((len(sent.outputs), width), float("nan"))
        rows[: len(own)] = own
        return rows

    dy, y, h = padded("dy", FEATURES), padded("y", HIDDEN), padded("h", FEATURES)
    combined = (*sent.handle, weights)
    return {
        "dispatch": ops.moe_dispatch_backward(
            dy, x, w, *sent.handle, top_k=TOP_K, capacity=capacity, group=group
        ),
        "combine": ops.moe_combine_backward(dout, y, *combined, group=group),
        "gemm_combine": ops.moe_gemm_combine_backward(dout, h, w2, *combined, group=group),
    }


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "slots": lambda: _returning(
        "_weighted", lambda rows: rows._replace(slots=(rows.slots + 1) % TOP_K)
    ),
    "weights": lambda: _returning(
        "_weighted", lambda rows: rows._replace(weights=rows.weights.roll(1, 0))
    ),
    "ends": lambda: _returning("_ends", lambda ends: (ends - 1).clamp(min=0)),
    "nobody's": lambda: _returning("_ends", lambda ends: torch.where(ends == ends[-1], MOST, ends)),
}


def _returning(name: str, change: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    old = getattr(moe_composed, name)
    return mock.patch.object(moe_composed, name, lambda *given: change(old(*given)))


def wrong(routing: str, capacity: int | None, column: bool, fault: str = "none") -> list[str]:
    """What is wrong with the gradients of all ops, and with those of the same calls again."""
    rank, found = mkernel.world().rank, []
    with FAULTS[fault]():
        got = found_gradients(routing, capacity, column)
        again = found_gradients(routing, capacity, column)
    combined, multiplied = true_combines(routing, rank)
    true = {
        "dispatch": true_dispatch(routing, rank),
        "combine": combined,
        "gemm_combine": multiplied,
    }
    for op, wanted in true.items():
        for number, (one, other, truth) in enumerate(zip(got[op], again[op], wanted, strict=True)):
            rows = len(truth)
            error = float((one[:rows].double() - truth).norm() / truth.norm().clamp_min(1e-30))
            if not error <= 8e-3:
                found.append(f"{op} {number} is off by {error:.1e}")
            if one[rows:].any() or (
                number == 0 and len(one) != (capacity or rows) and op != "dispatch"
            ):
                found.append(f"{op} {number}: rows behind the last")
            if not torch.equal(one, other):
                found.append(f"{op} {number}: other bits")
            if one.dim() == 3 and one.transpose(1, 2).is_contiguous() != column:
                found.append(f"{op} {number}: another layout")
    return found


@pytest.mark.parametrize(("capacity", "column"), [(None, True), (MOST + 5, False)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_each_derivative_is_right_and_has_the_same_bits(
    routing: str, capacity: int | None, column: bool
) -> None:
    results = on_ranks(wrong, routing, capacity, column, ranks=RANKS, accelerator=ALONE)
    assert results == [[]] * RANKS


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "none"])
def test_faults_are_seen(fault: str) -> None:
    results = on_ranks(wrong, "duplicates", MOST + 5, False, fault, ranks=RANKS, accelerator=ALONE)
    assert all(results)


def counted() -> bool:
    """Return whether gradients of weights that are sums of more than bfloat16's 8 bits are exact."""
    world, width = mkernel.world(), 512
    chance = torch.Generator().manual_seed(world.rank)
    ids = routed("padded", world.rank)
    sent = mkernel.moe_dispatch(
        torch.ones(TOKENS, width, dtype=torch.bfloat16), ids, num_experts=EXPERTS
    )
    dout = (torch.rand(TOKENS, width, generator=chance) < 0.9).bfloat16()
    _, found = ops.moe_combine_backward(
        dout, sent.rows, *sent.handle, weights_of(world.rank), group=world.name
    )
    wanted = dout.float().sum(1, keepdim=True) * (ids >= 0)
    assert not torch.equal(wanted.bfloat16().float(), wanted)
    return torch.equal(found, wanted)


def test_gradients_of_weights_have_more_bits_than_what_travels() -> None:
    assert all(on_ranks(counted, ranks=RANKS, accelerator=ALONE))


def of_one_row() -> list[bool]:
    """Return whether gradients are right of a row whose stride is 1, at an address that is odd."""
    world = mkernel.world()
    x, w = drawn("x", 0, 1, HIDDEN), drawn("w", world.rank, EACH, HIDDEN, FEATURES)
    sent = mkernel.moe_dispatch_gemm(x, torch.tensor([[2 * world.rank]]), w)
    memory = torch.empty(FEATURES + 1, dtype=x.dtype)
    dy = memory[1:].copy_(drawn("dy", 0, FEATURES)).view(FEATURES, 1).t()
    assert dy.is_contiguous()
    assert dy.stride(0) == 1
    odd = torch.empty(w.numel() + 1, dtype=w.dtype)[1:].view_as(w).copy_(w)
    of_x, of_w = ops.moe_dispatch_backward(dy, x, odd, *sent.handle, top_k=1, group=world.name)
    _, of_w2, _ = ops.moe_gemm_combine_backward(
        x, dy, odd.transpose(1, 2), *sent.handle, torch.ones(1, 1), group=world.name
    )
    outer = torch.outer(x[0], dy[0])
    return [
        torch.allclose(of_x, dy @ w[0].t(), rtol=2e-2),
        torch.equal(of_w, torch.stack([outer, 0 * outer])),
        torch.equal(of_w2.transpose(1, 2), of_w),
    ]


def test_a_single_row_has_any_stride() -> None:
    assert on_ranks(of_one_row, ranks=RANKS, accelerator=ALONE) == [[True] * 3] * RANKS


def of_invariant_rows() -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of tokens, and what a GEMM+combine makes of those of rows with the promise, and
    without it."""
    world = mkernel.world()
    x, w = drawn("x", world.rank, TOKENS, HIDDEN), drawn("w", world.rank, 4, HIDDEN, FEATURES)
    ids = drawn_ids("uniform", world.rank, experts=8, tokens=TOKENS, top_k=6)
    sent = mkernel.moe_dispatch_gemm(x.requires_grad_(), ids, w, invariant=True)
    rows = sent.outputs.detach()
    (found,) = torch.autograd.grad(sent.outputs, x, rows)
    home = [
        mkernel.moe_gemm_combine(
            rows, w.transpose(1, 2), sent.handle, torch.ones(ids.shape), invariant=invariant
        )
        for invariant in (True, False)
    ]
    return found, home[0], home[1]


def test_gradients_of_tokens_keep_the_promise_of_their_dispatch() -> None:
    for found, invariant, other in on_ranks(of_invariant_rows, ranks=2, accelerator=ALONE):
        assert torch.equal(found, invariant)
        assert not torch.equal(found, other)


# ---- whole layers --------------------------------------------------------------------------------


def inputs(rank: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """x, w, w2, topk_weights; products are small, because the loss is a sine."""
    shapes = (
        ("x", TOKENS, HIDDEN),
        ("w", EACH, HIDDEN, 2 * FEATURES),
        ("w2", EACH, FEATURES, HIDDEN),
    )
    made = [
        operand(name, rank, *shape) * scale
        for (name, *shape), scale in zip(shapes, (1, 0.2, 0.2), strict=True)
    ]
    return [*(each.to(dtype).requires_grad_() for each in made), weights_of(rank).requires_grad_()]


def layer(
    x: Tensor, ids: Tensor, w: Tensor, w2: Tensor, weights: Tensor, capacity: int | None
) -> Tensor:
    sent = mkernel.moe_dispatch_gemm(x, ids, w, capacity=capacity, activation="silu_and_mul")
    return mkernel.moe_gemm_combine(sent.outputs, w2, sent.handle, weights)


def differentiated(
    capacity: int | None, dtype: torch.dtype = torch.bfloat16, backend: str | None = None
) -> list[Tensor]:
    rank = mkernel.world().rank
    x, w, w2, weights = given = inputs(rank, dtype)
    called: Callable[..., Tensor] = layer
    if backend is not None:
        torch._dynamo.reset()
        called = torch.compile(layer, backend=CompileCounterWithBackend(backend), fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=capacity is None):
        out = called(x, routed("padded", rank), w, w2, weights, capacity)
        return list(torch.autograd.grad(out.float().sin().sum(), given))


def true_gradients() -> Iterator[list[Tensor]]:
    """Each rank's gradients, in float64 and without ranks."""
    every = [
        [each.detach().double().requires_grad_() for each in inputs(rank)] for rank in range(RANKS)
    ]
    w, w2 = (torch.cat([own[at] for own in every]) for at in (1, 2))
    losses = []
    for rank, (x, *_, weights) in enumerate(every):
        ids = routed("padded", rank)
        gate, up = torch.einsum("th,tkhf->tkf", x, w[ids.clamp(min=0)]).chunk(2, -1)
        y = torch.einsum("tkf,tkfh->tkh", torch.nn.functional.silu(gate) * up, w2[ids.clamp(min=0)])
        losses.append(torch.einsum("tk,tkh->th", weights * (ids >= 0), y).sin().sum())
    found = torch.autograd.grad(torch.stack(losses).sum(), [each for own in every for each in own])
    for rank in range(RANKS):
        yield list(found[4 * rank : 4 * rank + 4])


@pytest.mark.parametrize(
    ("capacity", "backend"),
    [(None, None), (MOST, None), (None, "aot_eager"), (MOST, "inductor")],
)
def test_gradients_are_those_of_the_unsharded_layer(
    capacity: int | None, backend: str | None
) -> None:
    results = on_ranks(
        differentiated, capacity, torch.bfloat16, backend, ranks=RANKS, accelerator=ALONE
    )
    for rank, (found, true) in enumerate(zip(results, true_gradients(), strict=True)):
        for name, one, other in zip(("x", "w", "w2", "weights"), found, true, strict=True):
            error = float((one.double() - other).norm() / other.norm())
            assert error <= 2e-2, f"rank {rank}, {name}: {error:.1e}"


def refused() -> str:
    with pytest.raises(Unsupported) as caught:
        differentiated(None, torch.float32)
    return str(caught.value)


def test_what_is_not_composed_a_companion_computes_or_none() -> None:
    for text in on_ranks(refused, ranks=RANKS, accelerator=ALONE):
        assert "does not provide 'moe_gemm_combine_backward'" in text
    results = on_ranks(
        differentiated, None, torch.float32, ranks=RANKS, accelerator=f"{ALONE},streams"
    )
    assert all(each.isfinite().all() for each in results[0])
