"""Speed of the ascend simulator, on the CPUs that this process may use.

    chrt -r 1 python bench/ascend_speed.py [--repeat 15]

Each figure compares two things that take turns in the same run, or counts CPU time; all are medians.
  gemm        functional: one rank's compute kernel of AllGather+GEMM (2048 x 1024 x 2048, float16 to
              float32) against torch's float32 matmul on as many threads: at least 0.6 of its speed
  strict      strict and timed (traced, and replayed), against functional: at most 5 times as long;
              that GEMM by itself, and whole calls of every op, two ranks in this process
  model_only  `mkernel bench --model-only`: 8 ranks of 4096^3, three views, CPU time: at most 10 s
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results_file
import torch

from mkernel import api
from mkernel.backends.accelerators.ascend import AscendAccelerator, _ascend
from mkernel.backends.accelerators.ascend.machine import Machine, load_machine
from mkernel.backends.accelerators.ascend.moe import table_words
from mkernel.backends.accelerators.ascend.timeline import model
from mkernel.harness.modelled import shapes
from mkernel.harness.spec import GEMMS, Shape
from mkernel.plan.model import LaunchPlan, MoeShape, OpName

sys.path.append(str(Path(__file__).parents[1] / "tests" / "unit" / "ascend"))

from rig import World

BARS = {"gemm_ratio": 0.6, "strict_times": 5.0, "model_only_cpu_s": 10.0}
WARM_UP = 2
TIMEOUT_S = 120.0
M, N, K = 2048, 1024, 2048
PRODUCT = {"m": M, "n": N, "k": K}
SIZES: dict[OpName, dict[str, int]] = {
    **{op: {"m": M, "n": N, "k": K // 2} for op in GEMMS},
    "moe_dispatch_gemm": {
        "tokens": 1024, "hidden": 1024, "features": 512, "experts": 16, "top_k": 4,
    },
    "ring_attention": {
        "batch": 1, "heads": 8, "kv_heads": 2, "sequence": 2048, "head_dim": 128, "causal": True,
    },
}  # fmt: skip
"""Of the calls of two ranks."""

Tensors = dict[str, torch.Tensor]


def call(world: World, tensors: list[Tensors], trace: bool) -> list[bytes]:
    """Make one call of all ranks, to its end; return the ranks' traces where asked for."""
    world.epoch += 1
    launches = [world.launch(rank, own, trace=trace) for rank, own in enumerate(tensors)]
    if not all(launch.wait(TIMEOUT_S) for launch in launches):
        raise TimeoutError(f"a call of {world.plan.op} did not end within {TIMEOUT_S} s")
    return [launch.trace() or b"" for launch in launches]


def planned(op: OpName, ranks: int, sizes: dict[str, int], layout: str = "row") -> LaunchPlan:
    """Plan a call on all cores of the simulated chip."""
    return api.plan(
        op,
        out_dtype="float32" if op in GEMMS else "float16",
        b_layout=layout,
        nodes=1,
        ranks_per_node=ranks,
        accelerator="ascend",
        **sizes,
    )


def inputs(world: World, seed: int) -> list[Tensors]:
    """Draw fresh ones for each rank, beside what the caller allocates, full of poison."""
    made: list[Tensors] = world.tensors(seed)
    plan = world.plan
    if isinstance(shape := plan.shape, MoeShape):  # the backend allocates its outputs
        words = 1 + table_words(plan.world_size, shape.tokens, shape.top_k, shape.experts)
        for own in made:
            for name in world.case.results(plan.world_size):
                del own[name]
            own["routing"] = torch.empty(words, dtype=torch.int32)
    return made


def seconds(action: Callable[..., object], *arguments: Any, **named: Any) -> float:
    """How long a call of ``action`` takes."""
    start = time.perf_counter()
    action(*arguments, **named)
    return time.perf_counter() - start


def traced_and_replayed(world: World, tensors: list[Tensors], machine: Machine) -> None:
    """A call, and its modelled time."""
    model(call(world, tensors, trace=True), machine, tracks=False)


def compared(plan: LaunchPlan, slots: int, repeat: int) -> dict[str, float]:
    """Time a call's functional and its strict run by turns, and torch's product where one rank's is the
    whole call: medians and how they compare."""
    machine, took, worst = load_machine(), dict[str, list[float]](), 0.0
    with (
        World(plan, slots=slots) as functional,
        World(plan, slots=slots, strict=_ascend.Strict()) as strict,
    ):
        for i in range(WARM_UP + repeat):
            tensors = inputs(functional, i)
            times = {"functional": seconds(call, functional, tensors, trace=False)}
            if plan.world_size == 1:
                want = torch.empty(M, N)
                wide = [tensors[0][name].float() for name in ("a", "b")]
                times["torch"] = seconds(torch.mm, *wide, out=want)
                off = torch.linalg.norm(tensors[0]["out"] - want) / torch.linalg.norm(want)
                worst = max(worst, float(off))
            times["strict"] = seconds(traced_and_replayed, strict, tensors, machine)
            for name, each in times.items():
                if i >= WARM_UP:
                    took.setdefault(name, []).append(each)
    middle = {name: statistics.median(each) for name, each in took.items()}
    found = {f"{name}_ms": round(each * 1e3, 2) for name, each in middle.items()}
    found["strict_times"] = round(middle["strict"] / middle["functional"], 2)
    if plan.world_size == 1:
        flops = 2.0 * M * N * K
        found["functional_gflops"] = round(flops / middle["functional"] / 1e9, 1)
        found["torch_gflops"] = round(flops / middle["torch"] / 1e9, 1)
        found["gemm_ratio"] = round(middle["torch"] / middle["functional"], 3)
        found["worst_difference"] = worst
    return found


def model_only(op: OpName) -> dict[str, float]:
    """8 ranks of 4096^3, nothing run: CPU seconds of this process, and what it predicts."""
    size = Shape(op=op, m=4096, n=4096, k=4096)
    start, wall = time.process_time(), time.perf_counter()
    (row,) = shapes([size], 8, "float16", "row", load_machine()).rows
    return {
        "model_only_cpu_s": round(time.process_time() - start, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        "modelled_pipelined_ms": round(row.modelled.pipelined_ms, 3),
    }


def main() -> int:
    """Measure, write the result; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=15)
    repeat = parser.parse_args().repeat
    cpus = len(os.sched_getaffinity(0))
    torch.set_num_threads(cpus)
    parts: dict[str, dict[str, dict[str, float]]] = {
        "gemm": {
            f"b_{b}_major": compared(planned("all_gather_gemm", 1, PRODUCT, b), cpus, repeat)
            for b in ("row", "column")
        },
        "strict": {
            op: compared(planned(op, 2, SIZES[op]), cpus, max(3, repeat // 3))
            for op in AscendAccelerator().capabilities().ops
            if op in SIZES  # moe_combine follows a dispatch, which has most of the work
        },
        "model_only": {op: model_only(op) for op in GEMMS},
    }
    rows = [row for part in parts.values() for row in part.values()]
    met = all(
        row[name] >= bar if name == "gemm_ratio" else row[name] <= bar
        for row in rows
        for name, bar in BARS.items()
        if name in row
    )
    results_file.write(
        "ascend_speed",
        {
            "shape": PRODUCT,
            "calls_of_two_ranks": SIZES,
            "threads": cpus,
            "load": [round(each, 1) for each in os.getloadavg()],
            "matrix_unit": _ascend.matrix_unit(),
            "repeat": repeat,
            "bars": BARS,
            "bars_met": met,
            **parts,
        },
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
