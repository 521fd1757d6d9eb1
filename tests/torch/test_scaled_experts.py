"""MoE with e4m3 experts: as the dequantised layer in float64, planned, registered, refused."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from ranks import close, on_ranks, operand
from torch import Tensor
from torch.nn.functional import silu

import mkernel
from mkernel.backends.accelerators.streams import moe as launches
from mkernel.backends.accelerators.streams import scaled
from mkernel.backends.accelerators.streams.exchange import exchange
from mkernel.backends.contracts.scaled import dequantised, quantised_blocks
from mkernel.cases.base import TOLERANCE
from mkernel.errors import ArgumentError, DtypeError, LayoutError, PlanMismatch, ShapeError
from mkernel.ops import moe
from mkernel.plan.predict import payloads

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
TOKENS, HIDDEN, FEATURES, EACH, TOP_K = 9, 384, 256, 2, 3
EXPERTS = EACH * RANKS
E4M3, BFLOAT16 = torch.float8_e4m3fn, TOLERANCE["bfloat16"]
ROUTINGS = ("uniform", "one rank", "none", "padded")


def routed(routing: str, rank: int) -> Tensor:
    chance = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS, EXPERTS, generator=chance).topk(TOP_K).indices
    if routing == "one rank":
        ids = ids % EACH
    elif routing == "none":
        ids = torch.full_like(ids, -1)
    elif routing == "padded":
        ids[:, 1] = -1
        ids[rank::4] = -1
    return ids


def weight(name: str, rank: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    """An expert's weights on a rank and their scales, which are far from each other and from 1."""
    w = operand(name, rank, EACH, n, k).to(E4M3).transpose(1, 2)
    scale = operand(f"{name} scale", rank, EACH, -(-n // 128), k // 128).exp() / 64
    return w, scale.transpose(1, 2)


def tokens(rank: int, kind: str) -> tuple[Tensor, Tensor | None]:
    """x and its scales; of 16 bits none. Blocks of a token are of unlike sizes; one token is zero."""
    x = operand("x", rank, TOKENS, HIDDEN)
    x *= (operand("size", rank, TOKENS, HIDDEN // 128)).exp().repeat_interleave(128, 1)
    x[1] = 0
    if kind == "e4m3":
        return quantised_blocks(x)
    return x.to(torch.bfloat16), None


def wide_rows(x: Tensor, scale: Tensor | None) -> Tensor:
    """Rows in float64: as they are, or as they are quantised, which is written here anew."""
    if scale is not None:
        return x.double() * scale.double().repeat_interleave(128, 1)
    blocks = x.float().view(len(x), -1, 128)
    step = blocks.abs().amax(2, keepdim=True) / torch.tensor(448.0)
    step[step == 0] = 1
    wide: Tensor = (blocks / step).to(E4M3).double() * step.double()
    return wide.flatten(1)


def wide_weights(name: str, k: int, n: int) -> Tensor:
    """The weights of all experts, in float64."""
    every = [weight(name, rank, k, n) for rank in range(RANKS)]
    return torch.stack(
        [
            dequantised(w, scale, torch.float64)
            for whole, scales in every
            for w, scale in zip(whole, scales, strict=True)
        ]
    )


def products(kind: str, routing: str, columns: int, rank: int) -> list[Tensor]:
    """The products of a rank's experts in the documented order, by expert, in float64."""
    w = wide_weights("w", HIDDEN, columns)
    found: list[list[Tensor]] = [[] for _ in range(EACH)]
    for source in range(RANKS):
        x = wide_rows(*tokens(source, kind))
        for token, ids in enumerate(routed(routing, source)):
            for each in ids.tolist():
                if each // EACH == rank and each >= 0:
                    found[each % EACH].append(x[token] @ w[each])
    return [torch.stack(rows) if rows else torch.zeros(0, columns).double() for rows in found]


def layer(kind: str, routing: str, quantise: bool, returns: Any, capacity: int | None) -> None:
    """Both ops of a rank against float64: outputs in their order, then tokens at home."""
    rank = mkernel.world().rank
    (x, x_scale), ids = tokens(rank, kind), routed(routing, rank)
    w, w_scale = weight("w", rank, HIDDEN, 2 * FEATURES)
    w2, w2_scale = weight("w2", rank, FEATURES, HIDDEN)
    given: dict[str, Any] = {"x_scale": x_scale, "w_scale": w_scale, "capacity": capacity}
    given |= {"activation": "silu_and_mul"}
    weights = operand("weights", rank, TOKENS, TOP_K)
    wanted = torch.cat(products(kind, routing, 2 * FEATURES, rank))
    gate, up = wanted.chunk(2, 1)
    wanted = silu(gate) * up
    if quantise:
        sent = mkernel.moe_dispatch_gemm(x, ids, w, quantise="block", **given)
        h, h_scale = sent.outputs, sent.scales
        found = dequantised(h, h_scale, torch.float64)[: len(wanted)]
        # A rounding to e4m3 is off by 1/16 of an element at most, and by half of that in the mean.
        close(found, wanted, 2**-5, "quantised outputs")
        again = mkernel.moe_dispatch_gemm(x, ids, w, out_dtype=torch.float32, **given)
        same = quantised_blocks(again.outputs[: len(wanted)])
        assert torch.equal(h[: len(wanted)].view(torch.uint8), same[0].view(torch.uint8))
        assert torch.equal(h_scale[: len(wanted)], same[1])
    else:
        plain = mkernel.moe_dispatch_gemm(x, ids, w, **given)
        sent, h, h_scale = plain, plain.outputs, None
        close(h[: len(wanted)], wanted, BFLOAT16, "outputs")
    rows = wide_rows(h, h_scale)[: len(wanted)]
    second = wide_weights("w2", FEATURES, HIDDEN)
    here = [len(each) for each in products(kind, routing, 2 * FEATURES, rank)]
    assert sent.counts.tolist() == here
    y = torch.cat([
        part @ second[rank * EACH + at] for at, part in enumerate(torch.split(rows, here))
    ])  # fmt: skip
    out = mkernel.moe_gemm_combine(
        h, w2, sent.handle, weights,
        h_scale=h_scale, w2_scale=w2_scale, out_dtype=torch.float32, returns=returns,
    )  # fmt: skip
    # What is y's sum at home, the op without scales says, which other tests hold against float64.
    padded = torch.zeros(len(h), HIDDEN, dtype=torch.float64)
    padded[: len(y)] = y
    home = mkernel.moe_combine(padded, sent.handle, weights, out_dtype=torch.float64)
    close(out, home, TOLERANCE["float32"], "out")
    if routing == "none":
        assert not out.any()


MOST = RANKS * TOKENS * TOP_K


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("kind", "quantise", "returns", "capacity"),
    [("bfloat16", True, "slots", None), ("e4m3", False, "ranks", MOST)],
)
def test_it_is_the_dequantised_layer(
    kind: str, routing: str, quantise: bool, returns: str, capacity: int | None
) -> None:
    on_ranks(layer, kind, routing, quantise, returns, capacity, ranks=RANKS)


# ---- faults that must be seen --------------------------------------------------------------------


def neighbours(travelled: Tensor, width: int) -> scaled.Rows:
    """Take the scale of each block for the next one."""
    values, scale = PARTED(travelled, width)
    assert scale is not None
    return scaled.Rows(values, scale.roll(1, 1))


def lost(rows: scaled.Rows) -> Tensor:
    """Lose the scales of rank 1 on their way."""
    if mkernel.world().rank == 1 and rows.scale is not None:
        rows = scaled.Rows(rows.values, torch.ones_like(rows.scale))
    return JOINED(rows)


def again(travelled: Tensor, width: int) -> scaled.Rows:
    """Quantise each copy again, with a scale of its own."""
    values, scale = PARTED(travelled, width)
    assert scale is not None
    return scaled.Rows(*quantised_blocks(dequantised(values, scale) * 1.3 / 1.3 + 1e-3))


def unpromoted(self: scaled.ScaledFactor, rows: scaled.Rows, out: Tensor) -> None:
    """Keep 14 bits of the sum of each block and those before it, as matrix units do."""
    assert rows.scale is not None
    a, sums = dequantised(rows.values, rows.scale), torch.zeros(len(out), out.shape[1])
    for k in range(0, a.shape[1], 128):
        sums += a[:, k : k + 128] @ self._b[k : k + 128]
        sums = (sums.view(torch.int32) & -(1 << 10)).view(torch.float32)
    out.copy_(sums)


def neighbouring_rows(call: Any, name: str, count: int | None = None) -> scaled.Rows:
    """Take the scale of each block for the next one in what GEMM+combine multiplies."""
    values, scale = ROWS_OF_EXPERTS(call, name, count)
    assert scale is not None
    return scaled.Rows(values, scale.roll(1, 1))


def lost_rows(call: Any, name: str, count: int | None = None) -> scaled.Rows:
    """Lose the scales of what rank 1's experts multiply in GEMM+combine."""
    values, scale = ROWS_OF_EXPERTS(call, name, count)
    assert scale is not None
    return scaled.Rows(values, torch.ones_like(scale) if mkernel.world().rank == 1 else scale)


class NeighbouringWeights(scaled.ScaledFactor):
    """Takes the scale of each block of a weight for the next one along K."""

    def __init__(self, b: Tensor, scale: Tensor, *given: Any, **options: Any) -> None:
        super().__init__(b, scale.roll(1, 0), *given, **options)


JOINED, PARTED, QUANTISED = scaled.joined, scaled.parted, quantised_blocks
ROWS_OF_EXPERTS = scaled.rows_of_experts
OF_ROWS, OF_WEIGHTS = "the scale of a neighbour block", "a weight's scale of a neighbour block"
LOST, UNPROMOTED = "a scale lost on one rank", "promotion left out"
ALIKE: dict[str, tuple[Any, str, Any]] = {
    "none": (scaled, "Rows", scaled.Rows),
    OF_WEIGHTS: (scaled, "ScaledFactor", NeighbouringWeights),
    UNPROMOTED: (scaled.ScaledFactor, "product", unpromoted),
}
FAULTS: dict[str, dict[str, tuple[Any, str, Any]]] = {
    "dispatch": {
        **ALIKE,
        OF_ROWS: (launches, "parted", neighbours),
        LOST: (launches, "joined", lost),
        "quantised again for each copy": (launches, "parted", again),
    },
    "combine": {
        **ALIKE,
        OF_ROWS: (launches, "rows_of_experts", neighbouring_rows),
        LOST: (launches, "rows_of_experts", lost_rows),
    },
}


def off(op: str, fault: str) -> float:
    """The relative error of a rank's outputs, or of its tokens at home."""
    rank, ids = mkernel.world().rank, routed("uniform", mkernel.world().rank)
    x, _ = tokens(rank, "bfloat16")
    w, w_scale = weight("w", rank, HIDDEN, FEATURES)
    made = products("bfloat16", "uniform", FEATURES, rank)

    def dispatch() -> mkernel.MoeDispatch:
        return mkernel.moe_dispatch_gemm(x, ids, w, w_scale=w_scale, out_dtype=torch.float32)

    if op == "combine":
        sent, weights = dispatch(), operand("weights", rank, TOKENS, TOP_K)
        h = operand("h", rank, len(sent.outputs), FEATURES).to(torch.bfloat16)
        w2, w2_scale = weight("w2", rank, FEATURES, HIDDEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*FAULTS[op][fault])
        if op == "dispatch":
            found = dispatch().outputs
        else:
            found = mkernel.moe_gemm_combine(
                h, w2, sent.handle, weights, w2_scale=w2_scale, out_dtype=torch.float32,
                partial_dtype=torch.float32,
            )  # fmt: skip
    if op == "dispatch":
        wanted = torch.cat(made)
    else:
        parts = torch.split(wide_rows(h, None), [len(each) for each in made])
        own = wide_weights("w2", FEATURES, HIDDEN)[rank * EACH :]
        y = torch.cat([part @ its for part, its in zip(parts, own, strict=False)])
        wanted = mkernel.moe_combine(y, sent.handle, weights, out_dtype=torch.float64)
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("op", "fault"), [(op, fault) for op in FAULTS for fault in FAULTS[op]])
def test_a_fault_is_seen(op: str, fault: str) -> None:
    worst = max(on_ranks(off, op, fault, ranks=RANKS))
    assert (worst > TOLERANCE["float32"]) == (fault != "none"), worst


def counted() -> tuple[int, set[int]]:
    """Rows that a dispatch quantised, and the bytes of rows that it sent."""
    rank, rows, widths = mkernel.world().rank, [], set()

    def quantised(given: Tensor) -> tuple[Tensor, Tensor]:
        rows.append(len(given))
        return QUANTISED(given)

    def sent(call: Any, streams: Any, outgoing: Any, incoming: Any) -> Any:
        each = outgoing(1 - rank)
        widths.add(each.shape[1] * each.element_size())
        return exchange(call, streams, outgoing, incoming)

    w, w_scale = weight("w", rank, HIDDEN, FEATURES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaled, "quantised_blocks", quantised)
        patch.setattr(launches, "exchange", sent)
        x, _ = tokens(rank, "bfloat16")
        mkernel.moe_dispatch_gemm(x, routed("one rank", rank), w, w_scale=w_scale)
    return sum(rows), widths


def test_a_token_is_quantised_once_and_travels_in_half_the_bytes() -> None:
    width = HIDDEN + HIDDEN // 128 * 4
    assert on_ranks(counted, ranks=RANKS) == [(TOKENS, {TOP_K * 4, width})] * RANKS


def most_wide() -> int:
    """Call both ops; return the most bytes that dequantised weights take at once."""
    rank, alive, most = mkernel.world().rank, [0], [0]

    def gone(nbytes: int) -> None:
        alive[0] -= nbytes

    def tracked(matrix: Tensor, *given: Any) -> Tensor:
        wide = dequantised(matrix, *given)
        if matrix.stride(0) == 1:  # a weight, which is column-major
            alive[0] += wide.nbytes
            weakref.finalize(wide, gone, wide.nbytes)
            most[0] = max(most[0], alive[0])
        return wide

    (x, _), ids = tokens(rank, "bfloat16"), routed("uniform", rank)
    w, w_scale = weight("w", rank, HIDDEN, FEATURES)
    w2, w2_scale = weight("w2", rank, FEATURES, HIDDEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaled, "dequantised", tracked)
        sent = mkernel.moe_dispatch_gemm(x, ids, w, w_scale=w_scale)
        mkernel.moe_gemm_combine(
            sent.outputs, w2, sent.handle, torch.ones(ids.shape), w2_scale=w2_scale
        )
    return most[0]


def test_one_weight_is_wide_at_once() -> None:
    """On the reference; ``hopper`` has none (``tests/gpu/test_expert_scales_on_gpus.py``)."""
    assert on_ranks(most_wide, ranks=RANKS) == [HIDDEN * FEATURES * 4] * RANKS


def nan_rows() -> None:
    rank = mkernel.world().rank
    x, _ = tokens(rank, "bfloat16")
    x[3, 200], x[4, 7] = float("nan"), float("inf")
    ids = routed("uniform", rank)
    w, w_scale = weight("w", rank, HIDDEN, FEATURES)
    sent = mkernel.moe_dispatch_gemm(x, ids, w, w_scale=w_scale, quantise="block")
    w2, w2_scale = weight("w2", rank, FEATURES, HIDDEN)
    out = mkernel.moe_gemm_combine(
        sent.outputs, w2, sent.handle, torch.ones(ids.shape), h_scale=sent.scales, w2_scale=w2_scale
    )
    lost_rows = torch.isnan(out).all(1)
    assert lost_rows.nonzero().flatten().tolist() == [3, 4]
    assert torch.isfinite(out[~lost_rows]).all()
    assert not out[1].any()


def test_a_token_that_is_no_number_stays_one_and_spoils_no_other() -> None:
    on_ranks(nan_rows, ranks=RANKS)


def planned() -> None:
    rank = mkernel.world().rank
    ids, (w, w_scale) = routed("uniform", rank), weight("w", rank, HIDDEN, FEATURES)
    plans = []
    for kind in ("bfloat16", "e4m3"):
        x, x_scale = tokens(rank, kind)
        plans.append(moe.dispatch(x, ids, w, x_scale=x_scale, w_scale=w_scale).plan)
    x = tokens(rank, "bfloat16")[0]
    plans.append(moe.dispatch(x, ids, w.to(torch.bfloat16)).plan)
    assert len({each.digest() for each in plans}) == 3
    assert [each.scales and each.scales.quantises for each in plans] == ["bfloat16", None, None]
    sent = [
        payloads("moe_dispatch_gemm", each.shape, each.dtype, RANKS).gather for each in plans
    ]  # fmt: skip
    assert sent[0] == sent[1] == sent[2] * (0.5 + 1 / 64)
    if rank:
        x, x_scale = tokens(rank, "e4m3")
    else:
        x_scale = None
    with pytest.raises(PlanMismatch, match=r"scales"):
        mkernel.moe_dispatch_gemm(
            x, ids, w, x_scale=x_scale, w_scale=w_scale, out_dtype=torch.float16
        )


def test_the_plan_says_how_rows_are_scaled_and_what_travels() -> None:
    on_ranks(planned, ranks=RANKS)


def refused() -> None:
    rank = mkernel.world().rank
    ids, (w, w_scale) = routed("uniform", rank), weight("w", rank, HIDDEN, FEATURES)
    x, _ = tokens(rank, "bfloat16")
    quantised, x_scale = tokens(rank, "e4m3")
    sent = mkernel.moe_dispatch_gemm(x, ids, w, w_scale=w_scale)
    weights = torch.ones(ids.shape)
    narrow = operand("w", 0, EACH, FEATURES, 64).to(E4M3).transpose(1, 2)
    wrong: list[tuple[type[Exception], str, tuple[Tensor, Tensor], dict[str, Any]]] = [
        (ArgumentError, "w_scale", (quantised, w), {"x_scale": x_scale}),
        (DtypeError, "w.dtype", (x, w), {}),
        (DtypeError, "x.dtype", (quantised, w), {"w_scale": w_scale}),
        (DtypeError, "x.dtype", (x.float(), w), {"w_scale": w_scale}),
        (DtypeError, "x.dtype", (x, w), {"x_scale": x_scale, "w_scale": w_scale}),
        (DtypeError, "w.dtype", (x, w.to(torch.bfloat16)), {"w_scale": w_scale}),
        (DtypeError, "w_scale.dtype", (x, w), {"w_scale": w_scale.double()}),
        (ShapeError, "w_scale", (x, w), {"w_scale": w_scale[:, 1:]}),
        (ShapeError, "x_scale", (quantised, w), {"x_scale": x_scale[1:], "w_scale": w_scale}),  # type: ignore[index]
        (ShapeError, "w", (x[:, :64].contiguous(), narrow), {"w_scale": w_scale}),
        (LayoutError, "w", (x, w.contiguous()), {"w_scale": w_scale}),
        (DtypeError, "out_dtype", (x, w), {"w_scale": w_scale, "out_dtype": E4M3}),
        (DtypeError, "out_dtype", (x, w), {"w_scale": w_scale, "out_dtype": torch.float64}),
        (ArgumentError, "quantise", (x, w), {"w_scale": w_scale, "quantise": "row"}),
        (ArgumentError, "quantise", (x, w.to(torch.bfloat16)), {"quantise": "block"}),
        (ArgumentError, "no backward", (x.clone().requires_grad_(), w), {"w_scale": w_scale}),
        (ArgumentError, "no backward", (x, w), {"w_scale": w_scale.clone().requires_grad_()}),
    ]
    for error, match, (rows, weight_), options in wrong:
        with pytest.raises(error, match=match):
            mkernel.moe_dispatch_gemm(rows, ids, weight_, **options)
    w2, w2_scale = weight("w2", rank, FEATURES, HIDDEN)
    h = sent.outputs
    for error, match, more in (
        (DtypeError, "w2.dtype", {}),
        (ArgumentError, "w2_scale", {"h_scale": w2_scale}),
        (ShapeError, "w2_scale", {"w2_scale": w2_scale[:, :1]}),
        (DtypeError, "out_dtype", {"w2_scale": w2_scale, "out_dtype": E4M3}),
    ):
        with pytest.raises(error, match=match):
            mkernel.moe_gemm_combine(h, w2, sent.handle, weights, **more)
    with pytest.raises(ArgumentError, match="no backward"):
        mkernel.moe_gemm_combine(h, w2, sent.handle, weights.requires_grad_(), w2_scale=w2_scale)
    mkernel.moe_gemm_combine(h, w2, sent.handle, weights.detach(), w2_scale=w2_scale)


def test_what_it_does_not_take_is_refused_by_name() -> None:
    on_ranks(refused, ranks=RANKS)


def compiled() -> None:
    """A compiled layer gives the bits of the eager one, twice, with scales that lie otherwise."""
    rank = mkernel.world().rank
    ids, (w, w_scale) = routed("uniform", rank), weight("w", rank, HIDDEN, 2 * FEATURES)
    w2, w2_scale = weight("w2", rank, FEATURES, HIDDEN)
    x, weights = tokens(rank, "bfloat16")[0], operand("weights", rank, TOKENS, TOP_K)

    def both(x: Tensor) -> Tensor:
        sent = mkernel.moe_dispatch_gemm(
            x, ids, w, w_scale=w_scale.contiguous(), capacity=MOST, activation="silu_and_mul",
            quantise="block",
        )  # fmt: skip
        return mkernel.moe_gemm_combine(
            sent.outputs, w2, sent.handle, weights, h_scale=sent.scales, w2_scale=w2_scale
        )

    quick = torch.compile(both, backend="aot_eager", fullgraph=True)
    for rows in (x, x * 2):
        wanted = both(rows)
        assert wanted.dtype == torch.bfloat16
        assert torch.equal(quick(rows), wanted)
        assert torch.equal(both(rows), wanted)


def test_a_compiled_layer_gives_the_same_bits() -> None:
    on_ranks(compiled, ranks=RANKS)


def known() -> None:
    """Calls that native code makes anew: each with other values, some with other scales."""
    rank = mkernel.world().rank
    ids, (w, w_scale) = routed("uniform", rank), weight("w", rank, HIDDEN, FEATURES)
    first = torch.cat(products("e4m3", "uniform", FEATURES, rank))
    for by in (1.0, 2.0, 0.5, 3.0):
        x, x_scale = tokens(rank, "e4m3")
        assert x_scale is not None
        sent = mkernel.moe_dispatch_gemm(
            x, ids, w, x_scale=x_scale * by, w_scale=w_scale * by, out_dtype=torch.float32
        )
        close(sent.outputs, first * by * by, TOLERANCE["float32"], f"by {by}")
        weights = torch.ones(ids.shape)
        w2, w2_scale = weight("w2", rank, FEATURES, HIDDEN)
        h, h_scale = quantised_blocks(sent.outputs)
        out = mkernel.moe_gemm_combine(
            h, w2, sent.handle, weights, h_scale=h_scale, w2_scale=w2_scale * by,
            out_dtype=torch.float32,
        )  # fmt: skip
        if by == 1:
            home = out
        elif by != 3:  # all that is rounded is so alike, by powers of two
            assert torch.equal(out, home * by**3)


def test_later_calls_read_their_own_scales() -> None:
    on_ranks(known, ranks=RANKS)


def unclaimed() -> None:
    rank = mkernel.world().rank
    ids, (w, w_scale) = routed("uniform", rank), weight("w", rank, HIDDEN, FEATURES)
    x, _ = tokens(rank, "bfloat16")
    sent = mkernel.moe_dispatch_gemm(x.float(), ids, w.float())
    named = r"accelerator 'ascend' takes: of e4m3 operands none in moe_dispatch_gemm"
    for more in ({}, {"quantise": "block"}):
        with pytest.raises(DtypeError, match=named):
            mkernel.moe_dispatch_gemm(x, ids, w, w_scale=w_scale, **more)  # type: ignore[call-overload]
    again = mkernel.moe_dispatch_gemm(x.float(), ids, w.float())
    assert torch.equal(again.outputs, sent.outputs), "nothing was started"


def test_it_is_refused_where_it_is_not_claimed() -> None:
    on_ranks(unclaimed, ranks=RANKS, accelerator="ascend")
