"""Speed of the ascend simulator's matrix work against torch's float32 matmul on the same cores.

    python bench/ascend_gemm.py [--m 2048 --n 1024 --k 2048] [--repeat 15]

One rank runs the compute kernel of AllGather+GEMM (M x K x N, float16 → float32, functional mode,
as many simulated cores at a time as the process has CPUs); torch multiplies float32 matrices of the
same shape with as many threads. The two take turns; the figures are medians of host wall time.
Bar: at least 0.5 of torch's speed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import results_file
import torch

from mkernel.backends.accelerators.ascend import AscendAccelerator, _ascend
from mkernel.backends.base import Call
from mkernel.backends.runtime import _runtime
from mkernel.plan.chunking import chunking
from mkernel.plan.model import GemmShape, LaunchPlan, Placement, Prediction, Resources

BAR = 0.5
WARM_UP = 3


def plan(m: int, n: int, k: int, b_layout: str) -> LaunchPlan:
    """One rank by itself: the compute kernel and nothing else."""
    return LaunchPlan(
        op="all_gather_gemm",
        shape=GemmShape(m=m, n=n, k=k),
        dtype="float16",
        out_dtype="float32",
        b_layout=b_layout,
        nodes=1,
        ranks_per_node=1,
        accelerator="ascend",
        nic=None,
        verbs=None,
        placement=(Placement(rank=0, node=0, local_rank=0, accelerator="ascend-sim0"),),
        routes=(),
        chunking=chunking(m, k, "float16"),
        order=((0,),),
        resources=Resources(compute_blocks=24, comm_blocks=48),
        prediction=Prediction(
            compute_us=0, comm_us=0, sequential_us=0, pipelined_us=0, constants="none"
        ),
    )


def measure(m: int, n: int, k: int, b_layout: str, repeat: int) -> dict[str, float]:
    """Medians in ms and GFLOP/s, and how many times torch's speed the simulator reaches."""
    backend = AscendAccelerator(slots=torch.get_num_threads())
    pad = backend.allocate(_runtime.pad_bytes(4096))
    _runtime.pad_format(pad.address, 4096)
    workspace = backend.allocate(4096)
    launch_plan = plan(m, n, k, b_layout)
    ours, theirs, errors = [], [], []
    for i in range(WARM_UP + repeat):
        torch.manual_seed(i)
        a = torch.randn(m, k).half()
        b = torch.randn(k, n).half() if b_layout == "row" else torch.randn(n, k).half().t()
        out = torch.full((m, n), float("nan"))
        wide_a, wide_b = a.float(), b.float()
        call = Call(
            plan=launch_plan,
            rank=0,
            tensors={"a": a, "b": b, "out": out},
            epoch=i + 1,
            number=i + 1,
            pad=pad.address,
            workspace=workspace.address,
            signal_base=0,
            peers={},
            region=0,
            fifo=0,
            timeout_s=60.0,
        )
        start = time.perf_counter()
        if not backend.launch(call).wait(60.0):
            raise TimeoutError("the compute kernel did not end within 60 s")
        middle = time.perf_counter()
        want = torch.mm(wide_a, wide_b)
        end = time.perf_counter()
        errors.append(float(torch.linalg.norm(out - want) / torch.linalg.norm(want)))
        if i >= WARM_UP:
            ours.append(middle - start)
            theirs.append(end - middle)
    flops = 2.0 * m * n * k
    mine, torchs = statistics.median(ours), statistics.median(theirs)
    pad.close()
    workspace.close()
    return {
        "ascend_ms": round(mine * 1e3, 2),
        "torch_ms": round(torchs * 1e3, 2),
        "ascend_gflops": round(flops / mine / 1e9, 1),
        "torch_gflops": round(flops / torchs / 1e9, 1),
        "ratio": round(torchs / mine, 3),
        "worst_difference": max(errors),
    }


def main() -> int:
    """Measure both layouts of B, write the result; 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--m", type=int, default=2048)
    parser.add_argument("--n", type=int, default=1024)
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    figures: dict[str, object] = {
        "shape": {"m": options.m, "n": options.n, "k": options.k},
        "threads": torch.get_num_threads(),
        "matrix_unit": _ascend.matrix_unit(),
        "repeat": options.repeat,
        "bar_ratio": BAR,
    }
    worst = float("inf")
    for b_layout in ("row", "column"):
        result = measure(options.m, options.n, options.k, b_layout, options.repeat)
        figures[f"b_{b_layout}_major"] = result
        worst = min(worst, result["ratio"])
    results_file.write("ascend_gemm", figures)
    return 0 if worst >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
