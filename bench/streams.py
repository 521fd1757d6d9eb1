"""The streams backend on a CPU against hand-written torch: matmul and gloo collectives.

    python bench/streams.py [--repeat 31] [--ranks 2]

Both run in the same processes and take turns, iteration by iteration, on fresh random inputs; which
of them goes first alternates. A barrier precedes each. An iteration's time is the slowest rank's;
the figures are medians over iterations. The hand-written side has the ops' semantics: sums in
float32, one rounding, the same dtype of output. It uses what is fastest in torch here: half-precision
operands are widened to float32 before the product, except bfloat16 into bfloat16.
Results are compared with each other after timing. On a busy machine run it under `chrt -r 1`.
Bar: at most 1.05 times the hand-written time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import results_file
import torch
from torch import distributed

import mkernel
from mkernel.cases.base import TOLERANCE

BAR = 1.05
WARM_UP = 3
SCHEDULING = {os.SCHED_RR: "real-time, round robin", os.SCHED_OTHER: "normal"}
SHAPES = {  # m, n, k as the ops' plans count them
    "all_gather_gemm": [(512, 512, 512), (2048, 1024, 1024), (1024, 2048, 2048)],
    "gemm_reduce_scatter": [(512, 512, 512), (2048, 1024, 512), (1024, 2048, 1024)],
    "gemm_all_reduce": [(512, 512, 512), (2048, 1024, 512), (1024, 2048, 1024)],
}
DTYPES = ("float32", "bfloat16", "float16")

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a @ b by hand."""
    if a.dtype == out.dtype and a.dtype != torch.float16:
        torch.mm(a, b, out=out)
    elif out.dtype == torch.float32:
        torch.mm(a.float(), b.float(), out=out)
    else:
        out.copy_(torch.mm(a.float(), b.float()))


def gather_by_hand(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """AllGather, then the product."""
    whole = a.new_empty(len(out), a.shape[1])
    distributed.all_gather_into_tensor(whole, a)
    product(whole, b, out)


def scatter_by_hand(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The product, then ReduceScatter of float32."""
    partial = torch.empty(len(a), b.shape[1])
    product(a, b, partial)
    own = out if out.dtype == torch.float32 else torch.empty(out.shape)
    distributed.reduce_scatter_tensor(own, partial)
    if own is not out:
        out.copy_(own)


def reduce_by_hand(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The product, then AllReduce of float32."""
    partial = out if out.dtype == torch.float32 else torch.empty(out.shape)
    product(a, b, partial)
    distributed.all_reduce(partial)
    if partial is not out:
        out.copy_(partial)


SIDES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "all_gather_gemm": (mkernel.all_gather_gemm, gather_by_hand),
    "gemm_reduce_scatter": (mkernel.gemm_reduce_scatter, scatter_by_hand),
    "gemm_all_reduce": (mkernel.gemm_all_reduce, reduce_by_hand),
}


def tensors(op: str, m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> Tensors:
    """a, b, out of this rank; fresh for each seed."""
    world = mkernel.world()
    torch.manual_seed(seed * world.size + world.rank)
    a_rows = m // world.size if op == "all_gather_gemm" else m
    out_rows = m // world.size if op == "gemm_reduce_scatter" else m
    a, b = torch.randn(a_rows, k).to(dtype), torch.randn(k, n).to(dtype)
    return a, b, torch.full((out_rows, n), float("nan"), dtype=dtype)


def measure(
    work: list[tuple[str, int, int, int, str]], repeat: int
) -> list[dict[str, list[float]]]:
    """Of this rank: seconds of both sides in each iteration, and their difference."""
    found = []
    for op, m, n, k, dtype in work:
        seconds: dict[str, list[float]] = {"streams": [], "by_hand": [], "difference": []}
        sides = dict(zip(("streams", "by_hand"), SIDES[op], strict=True))
        for iteration in range(WARM_UP + repeat):
            a, b, out = tensors(op, m, n, k, getattr(torch, dtype), iteration)
            results = {}
            for name in sorted(sides, reverse=iteration % 2 == 0):
                outs = {"out": torch.full_like(out, float("nan"))}
                distributed.barrier()
                start = time.perf_counter()
                if name == "streams":
                    sides[name](a, b, **outs)
                else:
                    sides[name](a, b, outs["out"])
                taken = time.perf_counter() - start
                if iteration >= WARM_UP:
                    seconds[name].append(taken)
                results[name] = outs["out"].double()
            gap = (results["streams"] - results["by_hand"]).norm() / results["by_hand"].norm()
            seconds["difference"].append(float(gap))
        found.append(seconds)
    return found


def main() -> int:
    """Measure, write the result; 1 where the bar is missed or results differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=31)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ops", nargs="*", default=list(SHAPES))
    options = parser.parse_args()
    work = [(op, *shape, dtype) for op in options.ops for shape in SHAPES[op] for dtype in DTYPES]
    load = round(os.getloadavg()[0], 2)  # of the machine: other work on it makes figures noisy
    ranks = mkernel.launch(
        measure, work, options.repeat, ranks_per_node=options.ranks, accelerator="streams"
    )
    rows, worst = [], 0.0
    for index, (op, m, n, k, dtype) in enumerate(work):
        slowest = {
            side: [max(each) for each in zip(*(rank[index][side] for rank in ranks), strict=True)]
            for side in ("streams", "by_hand", "difference")
        }
        ours, theirs = (statistics.median(slowest[side]) for side in ("streams", "by_hand"))
        ratio, difference = ours / theirs, max(slowest["difference"])
        if difference > 2 * TOLERANCE[dtype]:  # type: ignore[index]
            raise SystemExit(f"{op} {m}x{n}x{k} {dtype}: results differ by {difference:.1e}")
        worst = max(worst, ratio)
        rows.append(
            {
                "op": op,
                "shape": {"m": m, "n": n, "k": k},
                "dtype": dtype,
                "streams_ms": round(ours * 1e3, 3),
                "by_hand_ms": round(theirs * 1e3, 3),
                "ratio": round(ratio, 3),
                "difference": difference,
            }
        )
    results_file.write(
        "streams",
        {
            "ranks": options.ranks,
            "repeat": options.repeat,
            "load_before": load,
            "scheduling": SCHEDULING.get(os.sched_getscheduler(0), "other"),
            "bar_ratio": BAR,
            "median_ratio": statistics.median(float(str(row["ratio"])) for row in rows),
            "worst_ratio": round(worst, 3),
            "within_bar": sum(float(str(row["ratio"])) <= BAR for row in rows),
            "rows": rows,
        },
    )
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
