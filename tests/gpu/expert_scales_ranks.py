"""Functions that rank processes on GPUs run: experts in e4m3, beside families of calls, and faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import calls
import torch
from moe_ranks import Moe, Work
from torch import Tensor

import mkernel
from mkernel.backends.accelerators.cuda.moe import executors as backend
from mkernel.backends.accelerators.cuda.moe.tuning import row_bytes
from mkernel.backends.accelerators.hopper.moe import executors as products
from mkernel.backends.contracts.scaled import dequantised, quantised_blocks
from mkernel.plan.model import BLOCK

E4M3 = torch.float8_e4m3fn
FAULTS = (
    "tokens' next block",
    "tokens' lost",
    "weights' next block",
    "next expert",
    "rows' next block",
)
"""Whose scale is wrong: a block's, those of rank 1, an expert's, those of the second op's rows."""


def planted(fault: str, work: Work) -> AbstractContextManager[object]:
    """Plant it between the executors and their kernels."""
    native, kept = backend.native(), list[Tensor]()

    def changed(tensor: Tensor) -> int:
        kept.append(tensor.contiguous())
        return kept[-1].data_ptr()

    def quantised_rows(**given: Any) -> Any:
        scale = work.given["x_scale"]
        if given["scales"] == scale.data_ptr():
            if fault == "tokens' next block":
                given["scales"] = changed(scale.roll(1, 1))
            if fault == "tokens' lost" and work.rank == 1:
                given["scales"] = changed(torch.ones_like(scale))
        return native.QuantisedRows(**given)

    def product(**given: Any) -> Any:
        stored = work.given["w_scale"].transpose(1, 2)
        if given["b_scales"] == stored.data_ptr():
            if fault == "weights' next block":
                given["b_scales"] = changed(stored.roll(1, 1))
            if fault == "next expert":
                given["b_scales"] = changed(stored.roll(1, 0))
        of_rows = work.found.get("scales")
        if fault == "rows' next block" and of_rows is not None and given["a_scales"]:
            assert given["a_scales"] == of_rows.data_ptr()
            given["a_scales"] = changed(of_rows.roll(1, 1))
        return native.GroupedProduct(**given)

    return calls.native_with(
        backend, products, QuantisedRows=quantised_rows, GroupedProduct=product
    )


@contextmanager
def counted(rows: list[int]) -> Iterator[None]:
    """Note how many rows each kernel that quantises gets."""
    native = backend.native()

    def quantised_rows(**given: Any) -> Any:
        rows.append(given["rows"])
        return native.QuantisedRows(**given)

    with calls.native_with(backend, QuantisedRows=quantised_rows):
        yield


def weights(seed: int, experts: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    """Experts' weights and scales, which differ between ranks."""
    chance = torch.Generator("cuda").manual_seed(2 * seed + mkernel.world().rank)
    w = torch.randn(experts, n, k, generator=chance, device="cuda").to(E4M3).transpose(1, 2)
    scale = torch.rand(experts, -(-n // BLOCK), k // BLOCK, generator=chance, device="cuda") + 0.1
    return w, (scale / 16).transpose(1, 2)


def tokens(shape: Moe, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens whose blocks are of unlike sizes, some of them zeros, and ids."""
    rank, size = mkernel.world().rank, mkernel.world().size
    chance = torch.Generator("cuda").manual_seed(100 + rank)
    x = torch.randn(shape.tokens, shape.hidden, generator=chance, device="cuda")
    of_blocks = torch.randn(shape.tokens, shape.hidden // BLOCK, generator=chance, device="cuda")
    x *= of_blocks.exp().repeat_interleave(BLOCK, 1)
    x[::5, :BLOCK] = 0
    x[1] = 0
    chances = torch.rand(shape.tokens, shape.experts * size, generator=chance, device="cuda")
    return x.to(dtype), chances.topk(shape.top_k, 1).indices


def quantised_once(shape: Moe, dtype: torch.dtype) -> list[str]:
    """Return what is wrong where tokens have 16 bits: results are, to the bit, those of tokens that
    torch quantised; each token is quantised once, and what comes between the products never again."""
    x, ids = tokens(shape, dtype)
    w, w_scale = weights(1, shape.experts, shape.hidden, 2 * shape.features)
    w2, w2_scale = weights(2, shape.experts, shape.features, shape.hidden)
    shares = torch.ones(ids.shape, device="cuda")
    found, rows = list[str](), list[int]()
    options: dict[str, Any] = {"w_scale": w_scale, "activation": "silu_and_mul"}
    values, scale = quantised_blocks(x)
    wanted = mkernel.moe_dispatch_gemm(values, ids, w, x_scale=scale, out_dtype=dtype, **options)
    with counted(rows):
        plain = mkernel.moe_dispatch_gemm(x, ids, w, **options)
        sent = mkernel.moe_dispatch_gemm(x, ids, w, quantise="block", **options)
        out = mkernel.moe_gemm_combine(
            sent.outputs, w2, sent.handle, shares, h_scale=sent.scales, w2_scale=w2_scale
        )
    if rows != [shape.tokens] * 2:
        found.append(f"two dispatches and a combine quantised {rows} rows")
    if plain.outputs.dtype != dtype or not torch.equal(plain.outputs, wanted.outputs):
        found.append("tokens in 16 bits give other bits than those that torch quantised")
    # What has 16 bits between the products was rounded once more before it was quantised.
    h = mkernel.moe_gemm_combine(plain.outputs, w2, plain.handle, shares, w2_scale=w2_scale)
    torch_h, torch_scale = quantised_blocks(plain.outputs)
    again = mkernel.moe_gemm_combine(
        torch_h, w2, plain.handle, shares, h_scale=torch_scale, w2_scale=w2_scale, out_dtype=dtype
    )
    if not torch.equal(h, again):
        found.append("rows in 16 bits give other bits than those that torch quantised")
    off = float((out.double() - h.double()).norm() / h.double().norm())
    if not off < 2**-4:
        found.append(f"a layer that quantises between its products is off by {off:.1e}")
    return found


def quantised_alike(x: Tensor) -> None:
    """Quantise rows by the kernel; AssertionError where bits are not torch's."""
    rows, width = x.shape
    each = row_bytes(width, scaled=True)
    found = torch.full((rows, each), 0xFF, dtype=torch.uint8, device="cuda")
    given = backend.native().QuantisedRows(
        x=x.data_ptr(), scales=0, out=found.data_ptr(), rows=rows, width=width, row_bytes=each,
        half=x.dtype == torch.float16,
    )  # fmt: skip
    backend.native().quantise_rows(0, given, torch.cuda.current_stream().cuda_stream)
    values, scales = quantised_blocks(x)
    assert torch.equal(found[:, :width], values.view(torch.uint8))
    behind = found[:, width : width + 4 * scales.shape[1]].contiguous()
    assert torch.equal(behind.view(torch.float32), scales)


def promoted(shape: Moe) -> tuple[float, float]:
    """The errors of products of positive numbers, which lose much where sums have 14 bits: of a
    dispatch, and of torch's product of the same rows with such sums."""
    rank, size = mkernel.world().rank, mkernel.world().size
    chance = torch.Generator("cuda").manual_seed(rank)
    x = torch.rand(shape.tokens, shape.hidden, generator=chance, device="cuda").to(E4M3)
    w = torch.rand(1, shape.features, shape.hidden, generator=chance, device="cuda").to(E4M3)
    ones = torch.ones(shape.tokens, shape.hidden // BLOCK, device="cuda")
    of_w = torch.ones(1, -(-shape.features // BLOCK), shape.hidden // BLOCK, device="cuda")
    ids = torch.full((shape.tokens, 1), rank, device="cuda")
    sent = mkernel.moe_dispatch_gemm(
        x, ids, w.transpose(1, 2), x_scale=ones, w_scale=of_w.transpose(1, 2)
    )
    assert sent.counts.tolist() == [shape.tokens], size
    wanted = x.double() @ w[0].double().t()
    one = torch.ones((), device="cuda")
    few: Tensor = torch._scaled_mm(
        x, w[0].t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return tuple(  # type: ignore[return-value]
        float((each.double() - wanted).norm() / wanted.norm()) for each in (sent.outputs, few)
    )


def no_numbers(shape: Moe) -> list[str]:
    """Return what is wrong where a token is no number, and another one is zero."""
    x, ids = tokens(shape, torch.bfloat16)
    x[3, 200], x[4, 7] = float("nan"), float("inf")
    w, w_scale = weights(1, shape.experts, shape.hidden, shape.features)
    w2, w2_scale = weights(2, shape.experts, shape.features, shape.hidden)
    found = []
    for quantise in (None, "block"):
        options: dict[str, Any] = {} if quantise is None else {"quantise": quantise}
        sent: Any = mkernel.moe_dispatch_gemm(x, ids, w, w_scale=w_scale, **options)
        h_scale = getattr(sent, "scales", None)
        out = mkernel.moe_gemm_combine(
            sent.outputs, w2, sent.handle, torch.ones(ids.shape, device="cuda"),
            h_scale=h_scale, w2_scale=w2_scale,
        )  # fmt: skip
        lost = torch.isnan(out).all(1)
        if lost.nonzero().flatten().tolist() != [3, 4] or not bool(out[~lost].isfinite().all()):
            found.append(f"quantise={quantise}: tokens {lost.nonzero().flatten().tolist()} are NaN")
        if out[1].any():
            found.append(f"quantise={quantise}: a token of zeros has a result")
    return found


def one_rank(shape: Moe) -> list[str]:
    """Return what is wrong where rank 0 has all tokens' experts, then half of them, then none."""
    rank, size = mkernel.world().rank, mkernel.world().size
    x, ids = tokens(shape, torch.bfloat16)
    w, w_scale = weights(1, shape.experts, shape.hidden, shape.features)
    most, found = size * shape.tokens * shape.top_k, []
    everyone = torch.arange(shape.tokens, device="cuda")[:, None]
    for share in (1.0, 0.5, 0.0):
        here = torch.where(everyone < share * shape.tokens, ids % shape.experts, -1)
        for capacity in (None, most):
            sent = mkernel.moe_dispatch_gemm(
                x, here, w, w_scale=w_scale, capacity=capacity, quantise="block"
            )
            rows = int(sent.counts.sum())
            if rows != (int(size * shape.tokens * share) * shape.top_k if rank == 0 else 0):
                found.append(f"share {share}, capacity {capacity}: {rows} rows")
            wide = dequantised(*(each[:rows] for each in (sent.outputs, sent.scales)))
            if not bool(wide.isfinite().all()) or (rows and not wide.any()):
                found.append(f"share {share}, capacity {capacity}: outputs are not there")
            rest = sent.outputs[rows:].view(torch.uint8)
            if rest.any() or not bool((sent.scales[rows:] == 1).all()):
                found.append(f"share {share}, capacity {capacity}: rows that are nobody's")
    return found


def memory(shape: Moe) -> list[tuple[int, int]]:
    """The most bytes that each op takes beyond its tensors, and what its rows need: tokens with their
    scales, those in order, and results; weights have far more."""
    x, ids = tokens(shape, torch.bfloat16)
    w, w_scale = weights(1, shape.experts, shape.hidden, 2 * shape.features)
    w2, w2_scale = weights(2, shape.experts, shape.features, shape.hidden)
    shares, found = torch.ones(ids.shape, device="cuda"), []
    rows = mkernel.world().size * shape.tokens * shape.top_k
    needed = 8 * (shape.tokens + rows) * (shape.hidden + 2 * shape.features)

    def dispatched() -> Any:
        return mkernel.moe_dispatch_gemm(
            x, ids, w, w_scale=w_scale, activation="silu_and_mul", quantise="block"
        )

    sent = dispatched()
    for call in (
        dispatched,
        lambda: mkernel.moe_gemm_combine(
            sent.outputs, w2, sent.handle, shares, h_scale=sent.scales, w2_scale=w2_scale
        ),
    ):
        call()
        mkernel.synchronize()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        mkernel.synchronize()
        found.append((torch.cuda.max_memory_allocated() - before, needed))
    assert needed < w2.nbytes, "a copy of weights would not show"
    return found
