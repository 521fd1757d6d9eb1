"""What a rank runs under a tool that watches one process, after ``hopper_ranks``: ``python
checked_kernels.py WHAT TOOL``, in the world of the environment's ranks. Prints ``right`` where it
is."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import attention_ranks
import hopper_ranks
import moe_ranks
import torch
from attention_ranks import Attention
from hopper_ranks import Shape
from moe_ranks import Moe
from sum_ranks import NormedProduct

import mkernel
from mkernel.backends.accelerators.hopper import attention as attention_op
from mkernel.backends.accelerators.hopper import tuning
from mkernel.backends.accelerators.hopper.attention_library import Seen
from mkernel.backends.accelerators.hopper.machine import machine

GEMMS = ("all_gather_gemm", "gemm_reduce_scatter")


def few_rows() -> list[str]:
    """GEMM+AllReduce by one kernel, of odd tiles, of whole ones, and of two waves of them; e4m3 too;
    with norms, of several ranks in the kernel."""
    shapes: list[Any] = [
        Shape("gemm_all_reduce", m, n, k, path="fused")
        for m, n, k in ((33, 1032, 520), (16, 1024, 512), (8, 17416, 72))
    ]
    scaled = [
        Shape(op, 34, 1040, 528, "float8_e4m3fn", "column", "fused", "bfloat16", scales, fast=True)
        for op, scales in (("gemm_all_reduce", "row"), ("gemm_reduce_scatter", "tensor"))
    ]
    normed = [NormedProduct(33, 1032, 520), NormedProduct(3, 264, 4096, norm="alone")]
    return hopper_ranks.judged([*shapes, *scaled, *normed], 0)


def medium() -> list[str]:
    """Every GEMM with tiles of 128 x 192, odd sizes."""
    tuning.tiling = lambda *_: "medium"
    shapes = [Shape(op, 512, 264, 200, path="fused") for op in hopper_ranks.OPS]
    return hopper_ranks.judged(shapes, 0)


def e4m3() -> list[str]:
    """Our own products of e4m3, and the scales of their results."""
    shapes = [
        Shape(op, 512, 272, 208, "float8_e4m3fn", "column", "fused", "bfloat16", scales, fast=True)
        for op in GEMMS
        for scales in ("row", "tensor")
    ]
    return hopper_ranks.judged(shapes, 0)


def attention() -> list[str]:
    """Parts of a ring and their merges."""
    whole = Attention(1, 4, 2, 288, causal=False)
    return attention_ranks.judged([whole, Attention(1, 4, 2, 288, causal=True)], 0)


def attention_by_flash() -> list[str]:
    """The same by FlashAttention-2, for initcheck, which takes memory that a library has stored to by
    TMA for uninitialised: it says so of cuDNN's results, and of torch's ``a @ b`` alone
    (``test_initcheck_does_not_see_stores_of_libraries_by_tma``). It sees those of FlashAttention-2, and
    so judges our reads of the parts, their merges and flags; cuDNN's own kernels it does not judge."""
    with mock.patch.object(attention_op, "attend", _flash_attention):
        return attention()


def _flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, causal: bool, scale: float
) -> Seen:
    """As :func:`.attention_library.attend`."""
    q, shared = q[:, :, first:], q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(shared, 1) for each in (k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return Seen(torch.empty_like(q).copy_(out), lse[:, :, : q.shape[2]].contiguous(), first)


def experts() -> list[str]:
    """The three MoE ops, sums of few and of many partial rows."""
    return moe_ranks.judged(
        [Moe(72, 136, 72), Moe(72, 136, 72, experts=4, top_k=4, narrow=True)], 0
    )


def experts_by_rows() -> list[str]:
    """The same with fewer rows for each expert than a box has: every result leaves by plain stores."""
    return moe_ranks.judged(
        [Moe(24, 136, 72), Moe(24, 136, 72, experts=4, top_k=4, narrow=True)], 0
    )


def experts_filled() -> list[str]:
    """The same as ``experts`` for initcheck, with NaN in the results of products before our kernels
    store to them by TMA, which the tool does not see
    (``test_initcheck_sees_stores_of_rows_and_none_of_boxes``). A result that is read and was not stored
    is NaN, which judges see; tables, rows in order and sums are the tool's to judge."""
    new_empty = torch.Tensor.new_empty

    def filled(like: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        made = new_empty(like, *size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with mock.patch.object(torch.Tensor, "new_empty", filled):
        return experts()


CHECKED: dict[str, Callable[[], list[str]]] = {
    each.__name__: each for each in (few_rows, medium, e4m3, attention, experts)
}
CONTROLS = {"experts_by_boxes": experts, "experts_by_rows": experts_by_rows}
"""What shows which stores initcheck sees."""
SEEN_BY_INITCHECK = {"attention": attention_by_flash, "experts": experts_filled}
"""What stands for one of these under that tool."""


def main(what: str, tool: str) -> int:
    """1 where any result was wrong."""
    run = SEEN_BY_INITCHECK.get(what) if tool == "initcheck" else None
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MKERNEL_CONSTANTS"] = str(_with_few_rows(Path(folder) / "constants.json"))
        mkernel.init(accelerator="hopper", timeout_s=200)
    try:
        failures = (run or {**CHECKED, **CONTROLS}[what])()
    finally:
        mkernel.finalize()
    print(*failures or ["right"], sep="\n")
    return 1 if failures else 0


def _with_few_rows(file: Path) -> Path:
    """This machine's constants, with few rows left to their kernel wherever it takes them."""
    constants = machine().constants
    assert constants.few_rows is not None
    everywhere = {"most_rows": 256, "least_columns": 1, "float8": True, "normalises": True}
    few = constants.few_rows.model_copy(update=everywhere)
    file.write_text(constants.model_copy(update={"few_rows": few}).model_dump_json())
    return file


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
