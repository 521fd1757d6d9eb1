"""Fused GEMM ops whose clusters claim tiles beside the same by strides, on two GPUs.

    python3 bench/tile_claims.py [result.json]         # times
    python3 bench/tile_claims.py --share [100]         # with so many multiprocessors of rank 0 held

Times: microseconds a call of the slowest rank in a CUDA graph of several calls, both by turns, and of
the product alone (``compute_only``), which exchanges nothing. L2 is not flushed. ``same``: whether both
gave the same bits. The bar is 1.005 on large shapes; sizes of the targets, from 8192 on.
Share: by strides and by claims, what becomes of calls of each op; by strides some reach their deadline.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from few_rows import torch_group
from graphs import captured, replay_us
from torch import distributed

import mkernel
from mkernel.errors import WorldError
from mkernel.harness.symm_mem import ENVIRONMENT

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "gpu")]  # ranks import this module, and find the tests' too

import claims_ranks  # noqa: E402
from hopper_ranks import OPS, Shape, Work  # noqa: E402
from results_file import described  # noqa: E402

REDUCED = [(4096, 4096, 1024), (8192, 8192, 2048), (16384, 16384, 4096), (8192, 8192, 7168)]
SIZES = {
    "all_gather_gemm": [
        (4096, 1024, 4096), (8192, 2048, 8192), (16384, 4096, 16384), (8192, 7168, 8192)
    ],
    "gemm_reduce_scatter": REDUCED,
    "gemm_all_reduce": REDUCED,
}  # fmt: skip
WAYS = {"strides": False, "claims": True}
GRAPH_US = 3000.0
REPLAYS = 15
DEADLINE_S = 5.0


def slowest(times: list[float]) -> list[float]:
    """Of the ranks, time by time."""
    found = torch.tensor(times, device="cuda")
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return list(found.tolist())


def alone_us(work: Any, calls: int) -> float:
    """Of a call that exchanges nothing, eagerly."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        work.problem.case.called(work.inputs, {"out": work.out}, {"view": "compute_only"})
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


def measured(op: str, m: int, n: int, k: int) -> dict[str, Any]:
    """One row, on every rank."""
    work = Work(Shape(op, m, n, k, layout="column", path="fused"))
    work.fill(0)
    flops = 2 * m * n * k
    count = max(2, min(20, int(GRAPH_US / (flops / 7e8))))
    graphs, outs, alone = {}, {}, dict[str, list[float]]()
    for name, claims in WAYS.items():
        with claims_ranks.taking(claims):
            work.call()
            mkernel.synchronize()
            outs[name] = work.out.clone()
            graphs[name] = captured([work.call] * count)
        alone[name] = []
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(1 + REPLAYS):
        for name in list(WAYS)[:: 1 if turn % 2 else -1]:
            torch.cuda.synchronize()
            distributed.barrier()
            torch.cuda.synchronize()
            us = replay_us(graphs[name], count)
            with claims_ranks.taking(WAYS[name]):
                own = alone_us(work, 3)
            if turn:
                times[name].append(us)
                alone[name].append(own)
    row: dict[str, Any] = {"op": op, "m": m, "n": n, "k": k}
    for what, found in (("", times), ("alone_", alone)):
        middle = {name: statistics.median(slowest(each)) for name, each in found.items()}
        row |= {what + name: round(us, 1) for name, us in middle.items()}
        row[what + "ratio"] = round(middle["claims"] / middle["strides"], 4)
    row["same"] = torch.equal(outs["strides"], outs["claims"]) and not work.failure(0)
    return row


def ranks(store: str) -> list[dict[str, Any]]:
    """What a rank runs."""
    rows = []
    with torch_group(store) as world:
        for op, sizes in SIZES.items():
            for size in sizes:
                rows.append(measured(op, *size))
                if world.rank == 0:
                    print(rows[-1], flush=True)
                torch.cuda.empty_cache()
        mkernel.synchronize()
    return rows


def share(blocks: int) -> None:
    """Prints what becomes of calls."""
    for op in reversed(OPS):
        shape = Shape(op, 8192, 8192, 2048, layout="column", path="fused")
        for name, claims in WAYS.items():
            try:
                found = mkernel.launch(
                    claims_ranks.in_a_share, shape, claims, blocks, (0,), 2, 4 * DEADLINE_S,
                    ranks_per_node=2, accelerator="hopper", timeout_s=DEADLINE_S,
                )  # fmt: skip
            except WorldError as raised:
                print(f"{op} by {name}: {type(raised).__name__}: {raised}", flush=True)
                continue
            for rank, (error, seconds, wrong) in enumerate(found):
                print(f"{op} by {name}, rank {rank}: {seconds:.2f} s {error} {wrong}", flush=True)


def main() -> None:
    """Both GPUs."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*sys.path[:2], *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    if "--share" in sys.argv:
        share(int(next(iter(sys.argv[2:]), "100")))
        return
    os.environ.update(ENVIRONMENT)
    found = mkernel.launch(
        ranks,
        f"/tmp/tile_claims_{os.getpid()}",
        ranks_per_node=2,
        accelerator="hopper",
        timeout_s=30,
    )
    if len(sys.argv) > 1:
        told = described("tile_claims", {"rows": found[0]})
        Path(sys.argv[1]).write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
