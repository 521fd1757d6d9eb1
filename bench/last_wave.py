"""Times of the fused GEMM ops with tiles of the last wave whole and in 2, 3 and 4 parts along K, on two
GPUs.

    python3 bench/last_wave.py [result.json] [count] [seed]

The first ``count`` shapes of ``mkernel bench --random`` of that seed with K of 1024 and more whose last
wave is not full, bfloat16, path fused; microseconds a call of the slower rank in CUDA graphs of
several, which take turns, median of the replays. ``planned``: the parts that a plan takes. What a
``cut`` costs, in ``machine.json``, is chosen by this and ``tile_menu.py``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from graphs import captured, medians_us
from path_constants import plan_of
from results_file import described

import mkernel
from mkernel.backends.accelerators.hopper import tuning
from mkernel.backends.accelerators.hopper.schedule import GatherSchedule, ReduceSchedule
from mkernel.harness.draws import drawn
from mkernel.harness.spec import Benched
from mkernel.ops import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from mkernel.ops.gemm import GemmOp
from mkernel.plan import planner
from mkernel.plan.model import GemmShape

OPS: dict[Benched, GemmOp] = {
    "all_gather_gemm": all_gather_gemm.OP,
    "gemm_reduce_scatter": gemm_reduce_scatter.OP,
    "gemm_all_reduce": gemm_all_reduce.OP,
}
SPLITS = (1, 2, 3, 4)
RANKS = 2
LEAST_K = 1024
REPLAYS = 7
GRAPH_US = 2000.0
FLOPS_A_US = 6e8


def shapes(seed: int) -> Iterator[dict[str, Any]]:
    """Those whose last wave is not full, and their plans."""
    for shape in drawn(1000, seed, tuple(OPS), RANKS):
        m, n, k = shape.m or 0, shape.n or 0, shape.k or 0
        if k < LEAST_K:
            continue
        sizes = {"m": m, "n": n, "k": k}
        how = plan_of(shape.op, sizes, RANKS, dtype="bfloat16", path="fused").schedule
        if not isinstance(how, GatherSchedule | ReduceSchedule):
            continue
        tiles, processors = tuning.tiles_shared_out(shape.op, GemmShape(**sizes), RANKS, how)
        places = processors * tuning.TILE_ROWS // tuning.CLUSTER_TILES[how.tiling][0]
        if tiles % places:
            yield {
                "op": shape.op, **sizes, "layout": shape.layout, "tiling": how.tiling, "tiles": tiles,
                "left": tiles % places, "planned": how.last_splits,
            }  # fmt: skip


def measured(count: int, seed: int) -> list[dict[str, Any]]:
    """What a rank runs: rows."""
    rows = []
    for row in islice(shapes(seed), count):
        op, m, n, k = (row[each] for each in ("op", "m", "n", "k"))
        gathers, scatters = op == "all_gather_gemm", op == "gemm_reduce_scatter"
        a = torch.randn(m // RANKS if gathers else m, k, device="cuda").bfloat16()
        b = torch.randn(k, n, device="cuda").bfloat16()
        b = b if row["layout"] == "row" else b.t().contiguous().t()
        out = torch.empty(m // RANKS if scatters else m, n, device="cuda", dtype=a.dtype)
        call = partial(OPS[op].call, a, b, out=out, path="fused")
        calls = max(2, min(20, int(GRAPH_US / (2 * m * n * k / FLOPS_A_US))))
        graphs = {}
        for splits in SPLITS:
            # What was planned before, and checked by it, has other parts.
            planner._planned.cache_clear()
            mkernel.world().planned.clear()
            mkernel.world().checked.clear()
            with mock.patch.object(tuning, "last_splits", return_value=splits):
                graphs[splits] = captured([call] * calls)
        times = medians_us(graphs, calls, REPLAYS)
        mkernel.synchronize()
        rows.append(row | {str(each): us for each, us in times.items()})
    return rows


def main() -> None:
    """Two GPUs."""
    count, seed = (int(each) for each in [*sys.argv[2:4], *("60", "7")[len(sys.argv[2:4]) :]])
    ranks = mkernel.launch(
        measured, count, seed, ranks_per_node=RANKS, accelerator="hopper", timeout_s=60
    )
    rows = []
    for both in zip(*ranks, strict=True):
        slower = {str(each): round(max(row[str(each)] for row in both), 2) for each in SPLITS}
        rows.append(both[0] | slower)
        print(rows[-1], flush=True)
    if len(sys.argv) > 1:
        told = described("last_wave", {"gpu": torch.cuda.get_device_name(0), "rows": rows})
        Path(sys.argv[1]).write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
