"""What a rank runs under a tool that watches one process, after ``hopper_ranks``: ``python
checked_kernels.py WHAT``, in the world of the environment's ranks. Prints ``right`` where it is."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention_ranks
import hopper_ranks
import moe_ranks
from attention_ranks import Attention
from hopper_ranks import Shape
from moe_ranks import Moe
from sum_ranks import NormedProduct

import mkernel
from mkernel.backends.accelerators.hopper import tuning
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
        Shape(op, 34, 1032, 528, "float8_e4m3fn", "column", "fused", "bfloat16", scales, fast=True)
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


def experts() -> list[str]:
    """The three MoE ops, sums of few and of many partial rows."""
    return moe_ranks.judged(
        [Moe(72, 136, 72), Moe(72, 136, 72, experts=4, top_k=4, narrow=True)], 0
    )


CHECKED: dict[str, Callable[[], list[str]]] = {
    each.__name__: each for each in (few_rows, medium, e4m3, attention, experts)
}


def main(what: str) -> int:
    """1 where any result was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MKERNEL_CONSTANTS"] = str(_with_few_rows(Path(folder) / "constants.json"))
        mkernel.init(accelerator="hopper", timeout_s=200)
    try:
        failures = CHECKED[what]()
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
    sys.exit(main(sys.argv[1]))
