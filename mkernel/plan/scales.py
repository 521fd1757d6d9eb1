"""Scales of e4m3 operands: their numbers, and the checks with which a plan has them.

With a of [M, K] and b of [K, N] in float8_e4m3fn, and float32 scales,

    C[m, n] = sum over k of (a[m, k] * a_scale[m, k]) * (b[k, n] * b_scale[k, n])

where the scales of a mode are spread over the elements that they are of:

    tensor  a_scale [1, 1]          b_scale [1, 1]
    row     a_scale [M, 1]          b_scale [1, N]
    block   a_scale [M, K / 128]    b_scale [K / 128, N / 128], N / 128 rounded up

as ``torch._scaled_mm`` has them. The scales of A are a rank's own and go where its rows go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkernel.errors import ArgumentError, DtypeError, LayoutError, ShapeError
from mkernel.plan.model import E4M3, DtypeName, ScaleMode, Scales

if TYPE_CHECKING:
    from mkernel.plan.capabilities import AcceleratorCapabilities

BLOCK = 128
"""The number of elements of a row of A, and of rows and columns of B, that share a scale by
blocks."""
RESULTS: tuple[DtypeName, ...] = ("bfloat16", "float16", "float32")
"""Dtypes of results of e4m3 operands, the default first."""


def scale_sizes(
    mode: ScaleMode, rows: int, n: int, k: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of the scales of an A of so many rows, and of B."""
    if mode == "tensor":
        return (1, 1), (1, 1)
    if mode == "row":
        return (rows, 1), (1, n)
    return (rows, k // BLOCK), (k // BLOCK, -(-n // BLOCK))


def check_scales(
    dtype: str,
    out_dtype: str | None,
    layout: str,
    scales: Scales | None,
    claims: AcceleratorCapabilities,
    accelerator: str,
) -> None:
    """Check the scales of a GEMM op against its dtypes, its layout and the backend's claims.

    Raises:
        DtypeError: operands without scales that need some, or the other way round; scales that the
            backend does not claim; a result that e4m3 operands do not have. ArgumentError: fewer
            bits for sums of blocks. LayoutError: B.
    """
    if (scales is not None) != (dtype == E4M3):
        legal = "operands of float8_e4m3fn beside scales, and no others"
        raise DtypeError(
            "dtype", repr(dtype), legal, why="a_scale and b_scale are of such operands"
        )
    if scales is None:
        return
    if scales.mode not in claims.scale_modes:
        claimed = f"{' or '.join(claims.scale_modes)} scales" if claims.scale_modes else "none"
        raise DtypeError(
            "dtype",
            f"{dtype!r} with {scales.mode} scales",
            f"what accelerator {accelerator!r} takes: of e4m3 operands {claimed}; else "
            + ", ".join(claims.dtypes),
        )
    if scales.mode == "block" and scales.use_fast_accum:
        raise ArgumentError(
            "use_fast_accum", True, "False: sums of products with scales by blocks are float32"
        )
    if out_dtype is not None and out_dtype not in RESULTS:
        raise DtypeError(
            "out_dtype", repr(out_dtype), f"one of: {', '.join(RESULTS)}", why="operands are e4m3"
        )
    if layout != "column":
        raise LayoutError(
            "b",
            "row-major",
            "K-major, as matrix units read e4m3: the transpose of a contiguous [N, K], such as "
            "weight.t(); else b.t().contiguous().t()",
        )


def check_blocks(scales: Scales | None, k: int) -> None:
    """Raise ShapeError if blocks of scales do not cover K."""
    if scales is not None and scales.mode == "block" and k % BLOCK:
        raise ShapeError("k", k, f"a multiple of {BLOCK}, with scales by blocks")
