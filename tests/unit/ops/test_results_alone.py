"""What ops return, against float64: dtypes, layouts, outputs that the caller gives, e4m3 operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mkernel
from mkernel.backends.contracts.output_memory import is_torchs
from mkernel.backends.contracts.scaled import dequantised, quantised_rows
from mkernel.ops.all_gather_gemm import OP as GATHER
from mkernel.ops.around import Scaled, scale_strides
from mkernel.ops.gemm import GemmCall
from mkernel.world.world import World

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
GEMMS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
E4M3 = torch.float8_e4m3fn
needs_scaled_mm = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU"),
    reason="this torch multiplies no e4m3 on CPUs",
)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    assert found.shape == wanted.shape
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error <= LIMITS[dtype]


def called(op: str, *operands: Any, **options: Any) -> Any:
    return getattr(mkernel, op)(*operands, **options)


@pytest.mark.parametrize("op", GEMMS)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("bias", [False, True])
def test_products(op: str, dtype: torch.dtype, bias: bool) -> None:
    a, b, c = drawn(8, 16, dtype=dtype), drawn(16, 24, dtype=dtype), drawn(24, dtype=dtype)
    wanted = a.double() @ b.double() + (c.double() if bias else 0)
    options = {"bias": c} if bias else {}
    close(called(op, a, b, **options), wanted, dtype)
    if dtype != torch.float32:
        close(called(op, a, b, out_dtype=torch.float32, **options), wanted, torch.float32)
    out = torch.full((8, 24), torch.nan, dtype=dtype)
    version = out._version
    assert called(op, a, b, out=out, **options) is out
    close(out, wanted, dtype)
    assert out._version > version


@pytest.mark.parametrize("op", GEMMS)
def test_operands_as_they_lie(op: str) -> None:
    a, b = drawn(8, 32)[:, ::2], drawn(24, 16).t()
    close(called(op, a, b), a.double() @ b.double(), torch.float32)
    wide = drawn(16, 48)[:, ::2]
    close(called(op, a, wide, bias=drawn(48)[::2]), a.double() @ wide.double() + drawn(48)[::2],
          torch.float32)  # fmt: skip


@pytest.mark.parametrize(
    ("op", "name"), [("all_gather_gemm", "gather_dim"), ("gemm_reduce_scatter", "scatter_dim")]
)
@pytest.mark.parametrize("dim", [0, 1, -2, -3])
def test_along_a_dimension(op: str, name: str, dim: int) -> None:
    a, b = drawn(2, 6, 16), drawn(16, 8)
    wanted = a.double() @ b.double()
    found = called(op, a, b, **{name: dim})
    close(found, wanted, torch.float32)
    assert found.movedim(dim, 0).is_contiguous()
    out = torch.full((2, 6, 8), torch.nan)
    assert called(op, a, b, out=out, **{name: dim}) is out
    close(out, wanted, torch.float32)


def test_what_was_gathered() -> None:
    a, b = drawn(2, 6, 16), drawn(16, 8)
    c, whole = mkernel.all_gather_gemm(a, b, gather_dim=1, return_gathered=True)
    assert torch.equal(whole, a)
    close(c, a.double() @ b.double(), torch.float32)
    kept = torch.full((2, 6, 16), torch.nan)
    c, whole = mkernel.all_gather_gemm(a, b, gather_dim=1, gathered=kept, return_gathered=True)
    assert whole is kept
    assert torch.equal(kept, a)
    kept.fill_(torch.nan)
    alone = mkernel.all_gather_gemm(a, b, gathered=kept)
    assert isinstance(alone, Tensor)
    assert torch.equal(kept, a)


def test_several_products_of_one_gather() -> None:
    a = drawn(2, 6, 16)
    several = [drawn(16, n) for n in (8, 24, 16)]
    biases = [drawn(n) for n in (8, 24, 16)]
    outs = [torch.full((2, 6, n), torch.nan) for n in (8, 24, 16)]
    wanted = [a.double() @ b.double() + c for b, c in zip(several, biases, strict=True)]
    found = mkernel.all_gather_gemm(a, several, bias=biases, gather_dim=1)
    given = mkernel.all_gather_gemm(a, several, bias=biases, gather_dim=1, out=outs)
    assert isinstance(found, list)
    for at, each in enumerate(wanted):
        close(found[at], each, torch.float32)
        assert given[at] is outs[at]
        close(outs[at], each, torch.float32)
    half = mkernel.all_gather_gemm(a.half(), [b.half() for b in several], out_dtype=torch.float32)
    assert [each.dtype for each in half] == [torch.float32] * 3
    taken = [torch.empty(2, 6, n) for n in (8, 24, 16)]
    mkernel.all_gather_gemm(a.half(), [b.half() for b in several], out=taken)
    for got, b in zip(taken, several, strict=True):
        close(got, a.half().double() @ b.half().double(), torch.float32)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["gemm_all_reduce", "all_reduce"])
def test_normalised(op: str, dtype: torch.dtype, residual: bool) -> None:
    operands = [drawn(2, 4, 16, dtype=dtype)]
    total = operands[0].double()
    if op == "gemm_all_reduce":
        operands.append(drawn(16, 16, dtype=dtype))
        total = total @ operands[1].double()
    weight = drawn(16, dtype=dtype)
    options: dict[str, Any] = {"norm_weight": weight, "eps": 0.25}
    if residual:
        options["residual"] = drawn(2, 4, 16, dtype=dtype) * 3
        total = total + options["residual"].double()
    wanted = total / (total.square().mean(-1, keepdim=True) + 0.25).sqrt() * weight.double()
    out = torch.full((2, 4, 16), torch.nan, dtype=dtype)
    for given in ({}, {"out": out}):
        found = called(op, *operands, **options, **given)
        normed, *new = found if residual else (found,)
        assert (normed is out) == bool(given)
        assert ((normed.double() - wanted).norm() / wanted.norm()) <= 2 * LIMITS[dtype]
        for each in new:
            assert ((each.double() - total).norm() / total.norm()) <= LIMITS[dtype]
    rows, scales, *new = called(op, *operands, **options, quantise="row")
    assert len(new) == residual
    assert rows.dtype == E4M3
    assert scales.shape == (2, 4, 1)
    assert ((rows.double() * scales - wanted).norm() / wanted.norm()) <= 0.05


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("mode", ["row", "block"])
def test_normalised_products_of_e4m3(mode: str, residual: bool) -> None:
    """The same bits as the norm of the product, and as its rows quantised."""
    a, b = drawn(6, 256).to(E4M3), drawn(136, 256).to(E4M3).t()
    of_a, of_b = ((6, 1), (136, 1)) if mode == "row" else ((6, 2), (2, 2))
    scales = {"a_scale": drawn(*of_a).abs(), "b_scale": drawn(*of_b).abs().t()}
    norm: dict[str, Any] = {"norm_weight": drawn(136).bfloat16(), "eps": 0.25}
    if residual:
        norm["residual"] = drawn(6, 136).bfloat16() * 9
    plain = called("gemm_all_reduce", a, b, **scales)
    wanted = called("all_reduce", plain, **norm)
    out = torch.full((6, 136), torch.nan).bfloat16()
    for given in ({}, {"out": out}):
        found = called("gemm_all_reduce", a, b, **scales, **norm, **given)
        for one, right in zip(
            found if residual else (found,), wanted if residual else (wanted,), strict=True
        ):
            assert torch.equal(one, right)
    normed, *new = wanted if residual else (wanted,)
    rows, scale, *again = called("gemm_all_reduce", a, b, **scales, **norm, quantise="row")
    for one, right in zip((rows, scale, *again), (*quantised_rows(normed), *new), strict=True):
        assert one.dtype == right.dtype
        assert torch.equal(one.view(torch.uint8), right.view(torch.uint8))


def test_eps_has_a_default() -> None:
    small = torch.full((2, 8), 1e-4, dtype=torch.float64)
    found = mkernel.all_reduce(small, norm_weight=torch.ones(8, dtype=torch.float64))
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, small / (1e-8 + 1e-6) ** 0.5)


def test_sums() -> None:
    x = drawn(3, 4, 8)[:, ::2]
    close(mkernel.all_reduce(x), x.double(), torch.float32)  # type: ignore[arg-type]
    wide = mkernel.all_reduce(x.half(), out_dtype=torch.float32)
    assert isinstance(wide, Tensor)
    assert torch.equal(wide, x.half().float())
    out = torch.full((3, 2, 8), torch.nan)
    version = out._version
    assert mkernel.all_reduce(x, out=out) is out
    assert torch.equal(out, x)
    assert out._version > version


def by_blocks(scale: Tensor, shape: torch.Size) -> Tensor:
    """A scale's value for each element of an operand."""
    for dim, size in enumerate(shape):
        scale = scale.repeat_interleave(-(-size // scale.shape[dim]), dim).narrow(dim, 0, size)
    return scale.double()


@needs_scaled_mm
@pytest.mark.parametrize("mode", ["tensor", "row", "block"])
@pytest.mark.parametrize("op", GEMMS)
def test_e4m3(op: str, mode: str) -> None:
    m, k, n = 16, 256, 128
    a, b = drawn(m, k).to(E4M3), drawn(n, k).to(E4M3).t()
    sizes = {"tensor": ((1, 1), (1, 1)), "row": ((m, 1), (1, n)), "block": ((m, 2), (2, 1))}[mode]
    of_a, of_b = (drawn(*size).abs() + 0.5 for size in sizes)
    wanted = (a.double() * by_blocks(of_a, a.shape)) @ (b.double() * by_blocks(of_b, b.shape))
    scales = {"a_scale": of_a, "b_scale": of_b}
    if mode == "tensor":
        scales = {"a_scale": of_a.view(()), "b_scale": of_b.view(1)}
    close(called(op, a, b, **scales), wanted, torch.bfloat16)
    bias = drawn(n)
    found = called(op, a, b, bias=bias, out_dtype=torch.float32, **scales)
    close(found, wanted + bias.double(), torch.float32)
    out = torch.full((m, n), torch.nan, dtype=torch.float16)
    assert called(op, a, b, out=out, **scales) is out
    close(out, wanted, torch.float16)


def test_scales_lie_as_their_operands_do() -> None:
    rows, columns = torch.ones(2, 8, 3), torch.ones(4, 3).t()
    for scales, dim, wanted in (
        ((rows, columns), 0, ("packed", "packed")),
        ((rows, columns), 1, ("scattered", "packed")),
        ((rows.transpose(0, 1), columns.contiguous()), 1, ("packed", "scattered")),
        ((torch.ones(1), torch.ones(1, 1)), 1, ("packed", "packed")),
    ):
        found = scale_strides(Scaled(*scales, False), dim)
        assert (found["a_scale"], found["b_scale"]) == wanted


@needs_scaled_mm
def test_e4m3_of_several() -> None:
    a = drawn(2, 8, 32).to(E4M3)
    several = [drawn(n, 32).to(E4M3).t() for n in (16, 32)]
    of_a, of_b = drawn(2, 8, 1).abs(), [drawn(1, n).abs() for n in (16, 32)]
    wanted = [(a.double() * of_a) @ (b.double() * s) for b, s in zip(several, of_b, strict=True)]
    found, whole = mkernel.all_gather_gemm(
        a, several, a_scale=of_a, b_scale=of_b, return_gathered=True, out_dtype=torch.float32
    )
    assert torch.equal(whole.view(torch.uint8), a.view(torch.uint8))
    for got, each in zip(found, wanted, strict=True):
        close(got, each, torch.float32)
    one, whole = mkernel.all_gather_gemm(
        a, several[0], a_scale=of_a, b_scale=of_b[0], return_gathered=True
    )
    close(one, wanted[0], torch.bfloat16)  # type: ignore[arg-type]
    bias, out = drawn(16), torch.empty(2, 8, 16)
    added, _ = mkernel.all_gather_gemm(
        a, several[0], a_scale=of_a, b_scale=of_b[0], bias=bias, out=out, return_gathered=True
    )
    assert added is out
    close(out, wanted[0] + bias.double(), torch.float32)


@pytest.mark.parametrize("scattered", ["a_scale", "b_scale"])
@pytest.mark.parametrize("op", GEMMS)
def test_scales_with_any_strides(op: str, scattered: str) -> None:
    """By blocks; backends take packed ones alone."""
    a, b = drawn(6, 256).to(E4M3), drawn(136, 256).to(E4M3).t()
    scales = {"a_scale": drawn(6, 2).abs(), "b_scale": drawn(2, 2).abs().t()}
    wanted = dequantised(a, scales["a_scale"], torch.float64) @ dequantised(
        b, scales["b_scale"], torch.float64
    )
    apart = scales[scattered].repeat_interleave(2, -1)[:, ::2]
    close(called(op, a, b, **scales | {scattered: apart}), wanted, torch.bfloat16)


def moe_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.tensor([[0, 2], [1, -1], [0, 0], [2, 1]])
    return drawn(4, 8, dtype=dtype), ids, drawn(3, 8, 16, dtype=dtype)


def sent(x: Tensor, ids: Tensor, w: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
    """Rows of all experts, one after the other, in the order of their slots; (token, slot) of each."""
    places = [
        (token, slot)
        for expert in range(len(w))
        for token, row in enumerate(ids.tolist())
        for slot, one in enumerate(row)
        if one == expert
    ]
    rows = [x[t].double() @ w[ids[t, s]].double() for t, s in places]
    return torch.stack(rows), places


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("capacity", [None, 9])
def test_experts(column: bool, capacity: int | None) -> None:
    x, ids, w = moe_inputs()
    if column:
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    found = mkernel.moe_dispatch_gemm(x, ids.int(), w, capacity=capacity)
    wanted, places = sent(x, ids, w)
    assert found.outputs.shape == (capacity or len(places), 16)
    close(found.outputs[: len(places)], wanted, torch.float32)
    assert found.counts.tolist() == [3, 2, 2]
    assert found.handle.counts is found.counts
    weights = drawn(4, 2, dtype=torch.float64)
    summed = torch.zeros(4, 16, dtype=torch.float64)
    for row, (token, slot) in zip(wanted, places, strict=True):
        summed[token] += weights[token, slot] * row
    close(mkernel.moe_combine(found.outputs, found.handle, weights), summed, torch.float32)
    half = mkernel.moe_combine(
        found.outputs, found.handle, weights.float(), out_dtype=torch.bfloat16
    )
    close(half, summed, torch.bfloat16)
    w2 = drawn(3, 16, 24)
    second = torch.zeros(4, 24, dtype=torch.float64)
    for row, (token, slot) in zip(wanted, places, strict=True):
        second[token] += weights[token, slot] * (row @ w2[ids[token, slot]].double())
    options: tuple[dict[str, Any], ...] = (
        {}, {"returns": "ranks"}, {"returns": "slots"},
        {"returns": "ranks", "partial_dtype": torch.float32},
    )  # fmt: skip
    for each in options:
        got = mkernel.moe_gemm_combine(found.outputs, w2, found.handle, weights, **each)
        close(got, second, torch.float32)


def test_experts_activated() -> None:
    x, ids, w = moe_inputs()
    found = mkernel.moe_dispatch_gemm(x, ids, w, activation="silu_and_mul")
    rows, _ = sent(x, ids, w)
    gate, up = rows.chunk(2, 1)
    close(found.outputs, torch.nn.functional.silu(gate) * up, torch.float32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("by_positions", [False, True])
@pytest.mark.parametrize("dtype", LIMITS)
def test_attention(causal: bool, by_positions: bool, dtype: torch.dtype) -> None:
    def lying(heads: int) -> Tensor:
        x = drawn(2, heads, 6, 8, dtype=dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if by_positions else x

    q, k, v = lying(4), lying(2) * 0.5, lying(2)
    for options, scale in (({}, 8**-0.5), ({"scale": 0.3}, 0.3)):
        scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3) * scale
        if causal:
            scores.masked_fill_(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        wanted = scores.softmax(-1) @ v.double().repeat_interleave(2, 1)
        out, lse = mkernel.ring_attention(q, k, v, causal=causal, return_lse=True, **options)
        close(out, wanted, dtype)
        assert out.stride() == q.stride()
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-3, atol=1e-3)
        again = mkernel.ring_attention(q, k, v, causal=causal, **options)
        assert torch.equal(again, out)  # type: ignore[arg-type]


def test_chunks_are_the_ones_that_are_asked_for() -> None:
    a, b = drawn(64, 16), drawn(16, 64)
    assert GATHER.call(GemmCall(a, b, chunk=16)).plan != GATHER.call(GemmCall(a, b, chunk=32)).plan


@pytest.mark.parametrize("how", [torch.no_grad, torch.enable_grad])
def test_with_and_without_gradients_alike(how: Callable[[], Any]) -> None:
    a, b = drawn(4, 8).requires_grad_(), drawn(8, 8)
    with how():
        c = mkernel.gemm_all_reduce(a, b)
    assert isinstance(c, Tensor)
    assert c.requires_grad == (how is torch.enable_grad)
    close(c.detach(), a.detach().double() @ b.double(), torch.float32)


@pytest.mark.parametrize("op", [*GEMMS, "all_reduce"])
def test_outputs_of_calls_that_torch_sees_are_torchs(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its compilers plan their memory; others are where the backend wants them."""
    seen, honest = [], World.allocation

    def allocation(self: World, *arguments: Any) -> Any:
        seen.append(is_torchs())
        return honest(self, *arguments)

    monkeypatch.setattr(World, "allocation", allocation)
    mkernel.world().path.forget()
    operands = (drawn(8, 16),) if op == "all_reduce" else (drawn(8, 16), drawn(16, 24))
    group = mkernel.world().name
    getattr(torch.ops.mkernel, op)(*operands, group=group)
    called(op, *operands)
    assert seen == [True, False]
