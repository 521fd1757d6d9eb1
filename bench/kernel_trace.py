"""Where the time of GEMM+AllReduce of few rows goes: a trace of the kernel on two GPUs, for Perfetto.

    cmake -DMKERNEL_TRACE=ON <build folder of the editable install>  # then build and install again
    python3 bench/kernel_trace.py trace.json [m n k]

Calls follow each other in a CUDA graph with cold weights, as in ``bench/few_rows.py``. Each block
leaves the times of its marks (``device/trace.cuh``). Prints how long each step took, in microseconds,
in the median block and in the block that took longest, medians over calls, and the time between the
last mark of a call and the first of the next. The file has some calls, one process a rank and one
track a block (open it at ui.perfetto.dev). The ranks' clocks are aligned by mail: the shortest way from
one to the other and back.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from few_rows import COLD_BYTES, graphed, torch_group, with_few_rows

import mkernel
from mkernel.harness.contenders.symm_mem import ENVIRONMENT
from mkernel.ops.gemm_all_reduce import OP

MARKS = (
    "begun", "free", "come", "loaded", "multiplied", "together", "sent", "taken", "ended",
)  # fmt: skip
STEPS = (
    ("begun", "free", "wait for the grid before"),
    ("free", "come", "first weights"),
    ("come", "multiplied", "weights"),
    ("multiplied", "together", "cluster"),
    ("together", "sent", "sums, sent"),
    ("sent", "taken", "wait for mail"),
    ("taken", "ended", "end"),
)
DRAWN = ("wait for the grid before", "first weights", "weights", "cluster", "sums, sent",
         "wait for mail", "end")  # fmt: skip
CALLS = 64
DRAWN_CALLS = 4


def traced(m: int, n: int, k: int, store: str) -> numpy.ndarray:
    """[calls, blocks, 1 + marks] of the last calls, by rising epoch; what a rank runs."""
    from mkernel.backends.accelerators.hopper import _hopper as native

    assert len(MARKS) == native.FEW_ROWS_MARKS
    with torch_group(store) as world:
        count = max(4, -(-COLD_BYTES // (2 * n * k)))
        weights = [torch.randn(n, k, device="cuda").bfloat16().t() for _ in range(count)]
        a = torch.randn(m, k, device="cuda").bfloat16()
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        plan = mkernel.plan(
            "gemm_all_reduce", m=m, n=n, k=k, dtype="bfloat16", b_layout="column", path="fused"
        )
        assert plan.schedule is not None
        how = plan.schedule.model_dump()
        if how["kind"] != "hopper.few_rows":
            raise SystemExit(f"{m} x {n} x {k} is planned as {how}; expected few rows")
        blocks = min(how["blocks"] // how["splits"], -(-n // 128)) * how["splits"]
        ring = torch.zeros(CALLS, blocks, 1 + len(MARKS), device="cuda", dtype=torch.int64)
        native.trace_few_rows(ring.data_ptr(), CALLS)
        took = graphed([lambda b=b: OP.call(a, b, out=out, path="fused") for b in weights])  # type: ignore[misc]
        mkernel.synchronize()
        if world.rank == 0:
            print(f"{m} x {n} x {k}: {took} us a call; {how}")
        found = ring.cpu().numpy()
    return found[numpy.argsort(found[:, 0, 0])]


def aligned(ranks: list[numpy.ndarray]) -> list[numpy.ndarray]:
    """Marks of the calls that all ranks traced, on the clock of rank 0, in microseconds."""
    epochs = sorted(set.intersection(*({int(e) for e in each[:, 0, 0] if e} for each in ranks)))
    kept = [each[numpy.isin(each[:, 0, 0], epochs)][:, :, 1:].astype(float) / 1e3 for each in ranks]
    sent, taken = MARKS.index("sent"), MARKS.index("taken")
    for rank in range(1, len(kept)):
        there = (kept[rank][:, :, taken] - kept[0][:, :, sent]).min()
        back = (kept[0][:, :, taken] - kept[rank][:, :, sent]).min()
        kept[rank] -= (there - back) / 2
    start = min(each.min() for each in kept)
    return [each - start for each in kept]


def shown(ranks: list[numpy.ndarray]) -> None:
    """A line a step."""
    place = {mark: at for at, mark in enumerate(MARKS)}
    for rank, marks in enumerate(ranks):
        for first, last, name in STEPS:
            took = marks[:, :, place[last]] - marks[:, :, place[first]]
            middle = statistics.median(numpy.median(took, axis=1).tolist())
            longest = statistics.median(took.max(axis=1).tolist())
            print(f"rank {rank}  {name:26} {middle:7.2f} {longest:7.2f}")
        ends, frees = marks[:, :, place["ended"]], marks[:, :, place["free"]]
        gaps = (frees.min(axis=1)[1:] - ends.max(axis=1)[:-1]).tolist()
        whole = (frees.min(axis=1)[1:] - frees.min(axis=1)[:-1]).tolist()
        spread = (ends.max(axis=1) - ends.min(axis=1)).tolist()
        apart = marks[:, :, place["multiplied"]]
        print(
            f"rank {rank}  from end to begin {statistics.median(gaps):.2f}, a call "
            f"{statistics.median(whole):.2f}, blocks end apart by {statistics.median(spread):.2f}, "
            f"are done with weights apart by "
            f"{statistics.median((apart.max(axis=1) - apart.min(axis=1)).tolist()):.2f}"
        )
    late = [each[:, :, place["multiplied"]].max(axis=1) for each in ranks]
    if len(late) == 2:
        print(
            f"ranks are done with weights apart by {numpy.median(numpy.abs(late[0] - late[1])):.2f}"
        )


def drawn(ranks: list[numpy.ndarray]) -> list[dict[str, Any]]:
    """Trace events of the last calls."""
    place = {mark: at for at, mark in enumerate(MARKS)}
    steps = [step for step in STEPS if step[2] in DRAWN]
    return [
        {
            "name": name, "ph": "X", "pid": rank, "tid": block,
            "ts": float(row[place[first]]), "dur": float(row[place[last]] - row[place[first]]),
        }
        for rank, marks in enumerate(ranks)
        for call in marks[-DRAWN_CALLS:]
        for block, row in enumerate(call)
        for first, last, name in steps
    ]  # fmt: skip


def main() -> None:
    """Both GPUs."""
    m, n, k = (int(each) for each in sys.argv[2:5] or (16, 8192, 4096))
    store = f"/tmp/kernel_trace_{os.getpid()}"
    with_few_rows(Path(store + ".json"))
    os.environ.update(ENVIRONMENT)
    found = mkernel.launch(
        traced, m, n, k, store, ranks_per_node=2, accelerator="hopper", timeout_s=60
    )
    ranks = aligned(found)
    shown(ranks)
    Path(sys.argv[1]).write_text(json.dumps({"traceEvents": drawn(ranks)}) + "\n")


if __name__ == "__main__":
    main()
