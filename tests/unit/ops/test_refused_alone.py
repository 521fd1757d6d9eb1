"""Arguments that ops refuse: the argument is named, and nothing is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mkernel
from mkernel.errors import ArgumentError, DtypeError, LayoutError, MkernelError, ShapeError

E4M3 = torch.float8_e4m3fn
IDS = torch.tensor([[0, 1], [1, -1], [0, 0]])


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape).to(dtype)


def gather(*given: Any, **options: Any) -> Any:
    return mkernel.all_gather_gemm(*given, **options)


def scatter(*given: Any, **options: Any) -> Any:
    return mkernel.gemm_reduce_scatter(*given, **options)


def reduced(*given: Any, **options: Any) -> Any:
    return mkernel.gemm_all_reduce(*given, **options)


def summed(*given: Any, **options: Any) -> Any:
    return mkernel.all_reduce(*given, **options)


def dispatch(*given: Any, **options: Any) -> Any:
    return mkernel.moe_dispatch_gemm(*given, **options)


def attend(*given: Any, **options: Any) -> Any:
    return mkernel.ring_attention(*given, **options)


def under_autocast(*given: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mkernel.all_gather_gemm(*given)


def handle(tokens: int = 3, top_k: int = 2) -> mkernel.MoeHandle:
    return dispatch(ones(tokens, 8), IDS[:tokens, :top_k].contiguous(), ones(2, 8, 8)).handle  # type: ignore[no-any-return]


A, B = ones(4, 8), ones(8, 8)
SCALES = {"a_scale": ones(1), "b_scale": ones(1)}
ROWS, LEFT, RIGHT = ones(5, 8), ones(4, 128, dtype=E4M3), ones(16, 128, dtype=E4M3).t()
NORM = {"norm_weight": ones(8)}
Q, KV = ones(1, 4, 6, 8), ones(1, 2, 6, 8)

REFUSED: list[tuple[Callable[[], Any], type[MkernelError], str]] = [
    # memory of mkernel.empty
    (lambda: mkernel.empty(4, torch.float32), ArgumentError, "shape = 4 is not legal"),  # type: ignore[arg-type]
    (lambda: mkernel.empty((2.5,), torch.float32), ArgumentError, r"shape = \(2.5,\)"),  # type: ignore[arg-type]
    (lambda: mkernel.empty((4,), "float32"), DtypeError, "dtype = 'float32'"),  # type: ignore[arg-type]
    # shapes and kinds of the operands
    (lambda: under_autocast(A.double(), B), DtypeError,
     "b.dtype = torch.bfloat16 .*mix; torch.autocast casts a, b, bias to torch.bfloat16, but"),
    (lambda: gather("a", B), DtypeError, "a = str"),
    (lambda: gather(A, None), DtypeError, "b = NoneType"),
    (lambda: gather(ones(8), B), ShapeError, "1-D"),
    (lambda: gather(ones(0, 8), B), ShapeError, "a = .*empty"),
    (lambda: gather(A, ones(2, 8, 8)), ShapeError, "b = .*3-D"),
    (lambda: gather(A, ones(8, 0)), ShapeError, "b = .*empty"),
    (lambda: gather(A, ones(7, 8)), ShapeError, "a has 8, b has 7"),
    (lambda: gather(A, ones(7, 8)), ShapeError,
     r"b = Tensor\(shape=\(7, 8\), dtype=torch.float32, strides=\(8, 1\)\)"),
    (lambda: gather(LEFT, [RIGHT], a_scale=ones(1)), ArgumentError, "b_scale = None"),
    (lambda: gather(LEFT, [RIGHT], b_scale=[ones(1)]), ArgumentError, "a_scale = None"),
    (lambda: gather(A, B.half()), DtypeError, "b.dtype"),
    (lambda: gather(A.int(), B.int()), DtypeError, "a.dtype"),
    (lambda: gather(A.to(E4M3), B.to(E4M3)), DtypeError, "need a_scale and b_scale"),
    (lambda: gather(A.to("meta"), B), ArgumentError, "a.device"),
    (lambda: gather(A, B.to("meta")), ArgumentError, "b.device"),
    (lambda: gather(A, B, bias=ones(7)), ShapeError, r"bias = .*\[8\]"),
    (lambda: gather(A, B, bias=ones(8).half()), DtypeError, "bias.dtype"),
    (lambda: gather(A, B, bias=ones(8).to("meta")), ArgumentError, "bias.device"),
    (lambda: gather(A, B, bias=3), DtypeError, "bias = int"),
    (lambda: gather(A, B, out_dtype=torch.int32), DtypeError, "out_dtype"),
    (lambda: gather(A, B, gather_dim=1), ArgumentError, "gather_dim = 1 .* 0 to 0"),
    (lambda: gather(A, B, gather_dim=-1), ArgumentError, "gather_dim = -1"),
    (lambda: gather(A, B, gather_dim=-3), ArgumentError, "gather_dim = -3"),
    (lambda: gather(A, B, gather_dim=False), ArgumentError, "gather_dim = False"),
    (lambda: gather(A, B, chunk=0), ArgumentError, "chunk"),
    (lambda: scatter(A, B, scatter_dim=1), ArgumentError, "scatter_dim"),
    # outputs
    (lambda: gather(A, B, out=ones(4, 7)), ShapeError, r"out = .*\(4, 8\)"),
    (lambda: gather(A, B, out=ones(4, 16)[:, ::2]), LayoutError, "out"),
    (lambda: gather(ones(2, 4, 8), B, gather_dim=1, out=ones(8, 8)), ShapeError, "out"),
    (lambda: gather(A, B, out=ones(4, 8).to("meta")), ArgumentError, "out.device"),
    (lambda: gather(A, B, out=ones(4, 8), out_dtype=torch.float16), DtypeError, "out = torch.float32"),
    (lambda: gather(A, B, gathered=ones(3, 8)), ShapeError, "gathered"),
    (lambda: gather(A, B, gathered=ones(4, 8).half()), DtypeError, "gathered"),
    (lambda: summed(A, out=ones(8, 4)), ShapeError, "out"),
    (lambda: summed(A, out=ones(8, 4).t()), LayoutError, "out"),
    (lambda: summed(A, out=ones(4, 8).to("meta")), ArgumentError, "out.device"),
    (lambda: summed(A.to("meta")), ArgumentError, "x.device"),
    (lambda: summed(ones(8)), ShapeError, "x"),
    (lambda: summed(A.int()), DtypeError, "x.dtype"),
    (lambda: summed(A, out_dtype=torch.int8), DtypeError, "out_dtype"),
    (lambda: scatter(A.clone().requires_grad_(), B, out=ones(4, 8)), ArgumentError, "requires grad"),
    (lambda: summed(A.clone().requires_grad_(), out=ones(4, 8)), ArgumentError, "requires grad"),
    # several products
    (lambda: gather(A, []), ArgumentError, "an empty list"),
    (lambda: gather(A, [B, ones(7, 16)]), ShapeError, r"b\[0\] = .*K = 7"),
    (lambda: gather(A, [ones(7, 4), B]), ShapeError, r"b\[0\]"),
    (lambda: gather(A, [ones(8, 4).half(), B]), DtypeError, r"b\[0\].dtype"),
    (lambda: gather(A, [ones(8), B]), ShapeError, r"b\[0\]"),
    (lambda: gather(A, [B, ones(1, 8, 8)]), ShapeError, r"b\[1\]"),
    (lambda: gather(A, [ones(8, 4).to("meta"), B]), ArgumentError, r"b\[0\].device"),
    (lambda: gather(A, [B, B], bias=[ones(8)]), ArgumentError, "bias = '?1 of them"),
    (lambda: gather(A, [B, B], bias=ones(8)), ArgumentError, "bias = '?Tensor"),
    (lambda: gather(A, [B, ones(8, 4)], bias=[None, ones(5)]), ShapeError, r"bias\[1\]"),
    (lambda: gather(A, [B, ones(8, 4)], bias=[None, ones(4).to("meta")]), ArgumentError,
     r"bias\[1\].device"),
    (lambda: gather(A, [B, ones(8, 4)], out=[ones(4, 8), ones(4, 5)]), ShapeError, r"out\[1\]"),
    # norms
    (lambda: reduced(A, B, residual=A), ArgumentError, "norm_weight = None"),
    (lambda: summed(A, residual=A), ArgumentError, "norm_weight = None"),
    (lambda: reduced(A, B, norm_weight=ones(7)), ShapeError, r"norm_weight.*a column of b"),
    (lambda: summed(A, norm_weight=ones(7)), ShapeError, r"norm_weight.*a column of x"),
    (lambda: summed(A, norm_weight=ones(8).half()), DtypeError, "norm_weight.dtype.*of x"),
    (lambda: reduced(A, B, norm_weight=ones(16)[::2]), LayoutError, "norm_weight"),
    (lambda: reduced(A, B, norm_weight=ones(8).to("meta")), ArgumentError, "norm_weight.device"),
    (lambda: reduced(A, B, **NORM, residual=ones(4, 7)), ShapeError, "residual"),
    (lambda: reduced(A, B, **NORM, residual=ones(8, 4).t()), LayoutError, "residual"),
    (lambda: reduced(A, B, **NORM, residual=A.half()), DtypeError, "residual"),
    (lambda: reduced(A, B, **NORM, residual=A.to("meta")), ArgumentError, "residual.device"),
    (lambda: reduced(A, B, **NORM, eps=0), ArgumentError, "eps"),
    (lambda: reduced(A, B, **NORM, eps=float("nan")), ArgumentError, "eps"),
    (lambda: reduced(LEFT, RIGHT, **SCALES, norm_weight=ones(16)), DtypeError,
     "norm_weight.dtype.*bfloat16, the dtype of the result"),
    (lambda: reduced(LEFT, RIGHT, **SCALES, norm_weight=ones(16).bfloat16().requires_grad_()),
     ArgumentError, "norm_weight = .*no backward for e4m3"),
    (lambda: reduced(LEFT, RIGHT, **SCALES, norm_weight=ones(16).bfloat16(), residual=ones(4, 16)),
     DtypeError, "residual"),
    (lambda: reduced(A, B, quantise="row"), ArgumentError, "without norm_weight"),
    (lambda: reduced(A, B, **NORM, quantise="column"), ArgumentError, "None or 'row'"),
    (lambda: reduced(A, B, **NORM, quantise="row", out=A.clone()), ArgumentError, "out = "),
    (lambda: summed(A, **NORM, quantise="row", out_dtype=torch.float16), ArgumentError, "out_dtype"),
    (lambda: summed(A, out_dtype=E4M3), DtypeError, "out_dtype"),
    (lambda: summed(A, norm_weight=ones(8).requires_grad_(), quantise="row"), ArgumentError,
     "norm_weight = .*no backward where it quantises"),
    (lambda: summed(A.clone().requires_grad_(), **NORM, quantise="row"), ArgumentError,
     "no backward where it quantises"),
    # scales
    (lambda: gather(LEFT, RIGHT, use_fast_accum=True), ArgumentError, "use_fast_accum"),
    (lambda: gather(LEFT, [RIGHT], use_fast_accum=True), ArgumentError, "use_fast_accum"),
    (lambda: gather(LEFT, RIGHT, a_scale=ones(1)), ArgumentError, "b_scale = None"),
    (lambda: gather(LEFT, RIGHT, b_scale=ones(1)), ArgumentError, "a_scale = None.*scales of a,"),
    (lambda: gather(A, RIGHT, **SCALES), DtypeError, "a.dtype"),
    (lambda: gather(LEFT, ones(128, 16), **SCALES), DtypeError, "b.dtype"),
    (lambda: gather(LEFT, RIGHT.contiguous(), **SCALES), LayoutError, "K-major.*weight.t"),
    (lambda: gather(LEFT, RIGHT, **SCALES, out_dtype=torch.float64), DtypeError, "out_dtype"),
    (lambda: gather(LEFT, RIGHT, **SCALES, out_dtype=E4M3), DtypeError, "out_dtype"),
    (lambda: gather(LEFT.clone().requires_grad_(), RIGHT, **SCALES), ArgumentError, "a = "),
    (lambda: gather(LEFT, RIGHT.clone().requires_grad_(), **SCALES), ArgumentError, "b = "),
    (lambda: gather(LEFT, RIGHT, a_scale=1.0, b_scale=ones(1)), DtypeError, "a_scale = float"),
    (lambda: gather(LEFT, RIGHT, a_scale=ones(1), b_scale=ones(1).half()), DtypeError,
     "b_scale.dtype"),
    (lambda: gather(LEFT, RIGHT, a_scale=ones(1), b_scale=ones(1).to("meta")), ArgumentError,
     "b_scale.device"),
    (lambda: gather(LEFT, RIGHT, a_scale=ones(3, 1), b_scale=ones(1, 16)), ShapeError,
     r"\[4, 1\] and \[1, 16\] \(row\)"),
    (lambda: gather(LEFT, RIGHT, a_scale=ones(4, 1), b_scale=ones(1)), ShapeError, "one element each"),
    (lambda: gather(ones(4, 96, dtype=E4M3), ones(16, 96, dtype=E4M3).t(), a_scale=ones(4, 1),
                    b_scale=ones(1, 2)), ShapeError, "multiple of 128"),
    (lambda: gather(LEFT, [RIGHT, RIGHT], a_scale=ones(4, 1), b_scale=[ones(1, 16)]), ArgumentError,
     "b_scale = '?1 of them"),
    (lambda: gather(LEFT, RIGHT, a_scale=ones(1), b_scale=ones(1).requires_grad_()), ArgumentError,
     "no backward for e4m3"),
    (lambda: gather(LEFT, [RIGHT, RIGHT], a_scale=ones(1).requires_grad_(), b_scale=[ones(1)] * 2),
     ArgumentError, "a_scale = .*no backward for e4m3"),
    # experts
    (lambda: mkernel.moe_gemm_combine(ROWS, ones(2, 8, 8), (1, 2), ones(3, 2)),  # type: ignore[arg-type]
     ArgumentError, "handle = '?tuple"),
    (lambda: dispatch(ones(3), IDS, ones(2, 8, 8)), ShapeError, "x"),
    (lambda: dispatch(ones(3, 8), IDS[0], ones(2, 8, 8)), ShapeError, "topk_ids"),
    (lambda: dispatch(ones(3, 8), IDS, ones(8, 8)), ShapeError, "w = "),
    (lambda: dispatch(ones(3, 8), IDS, ones(2, 8, 0)), ShapeError, "w = "),
    (lambda: dispatch(ones(3, 8), IDS, ones(2, 7, 8)), ShapeError, "H = 8"),
    (lambda: dispatch(ones(4, 8), IDS, ones(2, 8, 8)), ShapeError, "T = 4"),
    (lambda: dispatch(ones(3, 8), IDS, ones(2, 8, 7), activation="silu_and_mul"), ShapeError, "2I"),
    (lambda: dispatch(ones(3, 8), IDS, ones(2, 8, 8), activation="gelu"), ShapeError, "activation"),
    (lambda: dispatch(ones(3, 16)[:, ::2], IDS, ones(2, 8, 8)), LayoutError, "x"),
    (lambda: dispatch(ones(3, 8), IDS.t().contiguous().t(), ones(2, 8, 8)), LayoutError, "topk_ids"),
    (lambda: dispatch(ones(3, 8).to("meta"), IDS, ones(2, 8, 8)), ArgumentError, "x.device"),
    (lambda: dispatch(ones(3, 8), IDS, ones(2, 8, 8).to("meta")), ArgumentError, "w.device"),
    (lambda: dispatch(ones(3, 8), IDS, ones(2, 8, 16)[:, :, ::2]), LayoutError, "w"),
    (lambda: dispatch(ones(3, 8).int(), IDS, ones(2, 8, 8).int()), DtypeError, "x.dtype"),
    (lambda: dispatch(ones(3, 8), IDS, ones(2, 8, 8).half()), DtypeError, "w.dtype"),
    (lambda: dispatch(ones(3, 8), IDS, ones(2, 8, 8), out_dtype=torch.int8), DtypeError, "out_dtype"),
    (lambda: dispatch(ones(3, 8), IDS.float(), ones(2, 8, 8)), DtypeError, "topk_ids.dtype"),
    (lambda: dispatch(ones(3, 8), IDS + 1, ones(2, 8, 8)), ArgumentError, "... 2 ..."),
    (lambda: dispatch(ones(3, 8), IDS - 1, ones(2, 8, 8)), ArgumentError, "... -2 ..."),
    (lambda: dispatch(ones(3, 8), IDS, ones(2, 8, 8), capacity=0), ArgumentError, "capacity"),
    (lambda: mkernel.moe_combine(ROWS, (1, 2), ones(3, 2)), ArgumentError,  # type: ignore[arg-type]
     "handle = '?tuple"),
    (lambda: mkernel.moe_combine(ones(4, 8), handle(), ones(3, 2)), ShapeError, r"\[5, D\]"),
    (lambda: mkernel.moe_combine(ones(5), handle(), ones(3, 2)), ShapeError, "y"),
    (lambda: mkernel.moe_combine(ones(5, 0), handle(), ones(3, 2)), ShapeError, "y"),
    (lambda: mkernel.moe_combine(ROWS, handle(), ones(3)), ShapeError, "topk_weights"),
    (lambda: mkernel.moe_combine(ROWS, handle(), IDS), DtypeError, "topk_weights.dtype"),
    (lambda: mkernel.moe_combine(ROWS, handle(), ones(4, 2)), ShapeError, "handle has"),
    (lambda: mkernel.moe_combine(ones(5, 16)[:, ::2], handle(), ones(3, 2)), LayoutError, "y"),
    (lambda: mkernel.moe_combine(ROWS, handle(), ones(3, 2).to("meta")), ArgumentError,
     "topk_weights.device"),
    (lambda: mkernel.moe_combine(ROWS.int(), handle(), ones(3, 2)), DtypeError, "y.dtype"),
    (lambda: mkernel.moe_gemm_combine(ROWS, ones(2, 7, 8), handle(), ones(3, 2)), ShapeError, "I = 8"),
    (lambda: mkernel.moe_gemm_combine(ROWS, ones(8, 8), handle(), ones(3, 2)), ShapeError, "w2"),
    (lambda: mkernel.moe_gemm_combine(ROWS, ones(3, 8, 8), handle(), ones(3, 2)), ShapeError,
     r"\[2, I, H\]"),
    (lambda: mkernel.moe_gemm_combine(ROWS, ones(2, 8, 8).half(), handle(), ones(3, 2)), DtypeError,
     "w2.dtype"),
    (lambda: mkernel.moe_gemm_combine(ROWS, ones(2, 8, 8).to("meta"), handle(), ones(3, 2)),
     ArgumentError, "w2.device"),
    (lambda: mkernel.moe_gemm_combine(ROWS, ones(2, 8, 8), handle(), ones(3, 2),
                                      partial_dtype=torch.int8), DtypeError, "partial_dtype"),
    # attention
    (lambda: attend(ones(4, 6, 8), KV, KV), ShapeError, "q"),
    (lambda: attend(Q, 3, KV), ShapeError, "k = '?int"),
    (lambda: attend(Q, ones(1, 2, 0, 8), KV), ShapeError, "k"),
    (lambda: attend(Q, KV, ones(1, 2, 6, 7)), ShapeError, "v"),
    (lambda: attend(Q, ones(1, 3, 6, 8), ones(1, 3, 6, 8)), ShapeError, "divides q's 4"),
    (lambda: attend(Q, KV, KV.to("meta")), ArgumentError, "v.device"),
    (lambda: attend(Q, KV.half(), KV), DtypeError, "k.dtype"),
    (lambda: attend(Q.int(), KV.int(), KV.int()), DtypeError, "q.dtype"),
    (lambda: attend(Q, KV, KV, scale=float("nan")), ArgumentError, "scale"),
    (lambda: attend(ones(1, 4, 8, 6).transpose(2, 3), KV, KV), LayoutError, "q"),
    (lambda: attend(Q, ones(1, 2, 8, 6).transpose(2, 3), KV), LayoutError, "k"),
    (lambda: attend(Q, KV, KV, cu_seqlens=[0, 6]), DtypeError, "cu_seqlens = '?list"),
    (lambda: attend(Q, KV, KV, cu_seqlens=torch.tensor([0, 6])), DtypeError, "cu_seqlens.dtype"),
    (lambda: attend(Q, KV, KV, cu_seqlens=torch.tensor([6]).int()), ShapeError, "cu_seqlens"),
    (lambda: attend(Q, KV, KV, cu_seqlens=torch.tensor([0, 5]).int()), ArgumentError, "cu_seqlens"),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(REFUSED)))
def test_refused_by_name(at: int) -> None:
    call, error, said = REFUSED[at]
    with pytest.raises(error, match=said) as raised:
        call()
    assert type(raised.value) is error
    if said.isidentifier():  # the argument is what is named first
        assert str(raised.value).startswith((f"{said} ", f"{said}."))
    assert "expected" in str(raised.value)
    assert "as planned" not in str(raised.value), "the op says so, not the launch"


def test_what_was_refused_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(ShapeError, match="a has 8, b has 7"):
            gather(A, ones(7, 8))


def test_what_has_no_backward_runs_where_none_is_recorded() -> None:
    weight = ones(8).requires_grad_()
    with torch.no_grad():
        summed(A, norm_weight=weight, quantise="row")
        gather(LEFT, RIGHT, a_scale=ones(1), b_scale=ones(1).requires_grad_())


@pytest.mark.parametrize(
    "call",
    [
        lambda a: gather(a, B),
        lambda a: scatter(a, B),
        lambda a: attend(a.view(1, 1, 4, 8), *(ones(1, 1, 4, 8),) * 2),
        lambda a: dispatch(a, torch.zeros(4, 1, dtype=torch.int64), ones(2, 8, 8)).outputs,
    ],
)
def test_a_batch_of_gradients_is_refused_as_what_it_is(call: Callable[[Tensor], Tensor]) -> None:
    a = ones(4, 8).requires_grad_()
    result = call(a)
    batch = ones(3, *result.shape)
    with pytest.raises(ArgumentError, match=r"a batch of gradients .* for each by itself"):
        torch.autograd.grad(result, a, batch, is_grads_batched=True)
