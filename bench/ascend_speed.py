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
from contextlib import ExitStack
from typing import Any, Literal

import results_file
import torch

from mkernel import api
from mkernel.backends.accelerators.ascend import AscendAccelerator, _ascend
from mkernel.backends.accelerators.ascend.machine import Machine, load_machine
from mkernel.backends.accelerators.ascend.timeline import model
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import PeerMemory, SymmetricMemory
from mkernel.backends.transport import _transport
from mkernel.cases import case_of
from mkernel.harness.modelled import shapes
from mkernel.harness.spec import GEMMS, Shape
from mkernel.plan.model import LaunchPlan, OpName
from mkernel.world.memory import Arena

BARS = {"gemm_ratio": 0.6, "strict_times": 5.0, "model_only_cpu_s": 10.0}
WARM_UP = 2
TIMEOUT_S = 120.0
M, N, K = 2048, 1024, 2048
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

Layout = Literal["row", "column"]
Tensors = dict[str, torch.Tensor]


class World:
    """Ranks of one node in this process, with calls of one plan. Closed by ``close``."""

    def __init__(self, plan: LaunchPlan, backend: AscendAccelerator) -> None:
        self.plan, self._backend = plan, backend
        self._epoch = 0
        self._ranks = range(plan.world_size)
        self._memory = ExitStack()
        self.close = self._memory.close
        space = backend.workspace(plan)
        self._pads = [self._allocate(_transport.pad_bytes(space.signals)) for _ in self._ranks]
        for pad in self._pads:
            _transport.pad_format(pad.address, space.signals)
        self._arena = Arena(space.areas)
        self._spaces = [self._allocate(self._arena.nbytes) for _ in self._ranks]

    def _allocate(self, nbytes: int) -> SymmetricMemory:
        memory = self._backend.allocate(nbytes)
        self._memory.callback(memory.close)
        return memory

    def call(self, tensors: list[Tensors], trace: bool) -> list[bytes]:
        """One call of all ranks, to its end; the ranks' traces where asked for."""
        self._epoch += 1
        memory = [
            PeerMemory(pad=pad.address, workspace=space.address)
            for pad, space in zip(self._pads, self._spaces, strict=True)
        ]
        launches = [
            self._backend.launch(
                Call(
                    plan=self.plan,
                    rank=rank,
                    tensors=tensors[rank],
                    epoch=self._epoch,
                    number=self._epoch,
                    pad=memory[rank].pad,
                    workspace=memory[rank].workspace,
                    areas=self._arena.offsets,
                    peers={peer: memory[peer] for peer in self._ranks if peer != rank},
                    region=0,
                    fifo=0,
                    timeout_s=TIMEOUT_S,
                    trace=trace,
                    options=options(self.plan),
                )
            )
            for rank in self._ranks
        ]
        if not all(launch.wait(TIMEOUT_S) for launch in launches):
            raise TimeoutError(f"a call of {self.plan.op} did not end within {TIMEOUT_S} s")
        return [launch.trace() or b"" for launch in launches]


def planned(op: OpName, ranks: int, sizes: dict[str, Any], layout: Layout = "row") -> LaunchPlan:
    """As the planner has it, on all cores of the simulated chip."""
    return api.plan(
        op,
        out_dtype="float32" if op in GEMMS else "float16",
        b_layout=layout,
        nodes=1,
        ranks_per_node=ranks,
        accelerator="ascend",
        **sizes,
    )


def inputs(plan: LaunchPlan, seed: int) -> list[Tensors]:
    """Fresh ones for each rank, and what the caller allocates, full of NaN."""
    case = case_of(plan.op)(
        sizes=plan.shape.model_dump(exclude={"kind"}),
        dtype=plan.dtype,
        out_dtype=plan.out_dtype,
        layout=plan.b_layout,
    )
    made = []
    for rank in range(plan.world_size):
        tensors = case.inputs(rank, plan.world_size, seed)
        if not plan.op.startswith("moe"):  # whose outputs the backend allocates
            for name, (shape, dtype) in case.results(plan.world_size).items():
                tensors[name] = torch.full(shape, float("nan"), dtype=dtype)
        made.append(tensors)
    return made


def options(plan: LaunchPlan) -> dict[str, Any]:
    """The op's scalars."""
    return {"scale": plan.shape.head_dim**-0.5} if plan.op == "ring_attention" else {}


def seconds(action: Callable[..., object], *arguments: Any, **named: Any) -> float:
    """How long a call of ``action`` takes."""
    start = time.perf_counter()
    action(*arguments, **named)
    return time.perf_counter() - start


def traced_and_replayed(world: World, tensors: list[Tensors], machine: Machine) -> None:
    """A call, and its modelled time."""
    model(world.call(tensors, trace=True), machine, tracks=False)


def gemm(layout: Layout, slots: int, repeat: int) -> dict[str, float]:
    """One rank's product, functional and strict, and torch's: medians and how they compare."""
    plan = planned("all_gather_gemm", 1, {"m": M, "n": N, "k": K}, layout)
    functional = World(plan, AscendAccelerator(slots=slots))
    strict = World(plan, AscendAccelerator(slots=slots, strict=_ascend.Strict()))
    machine = load_machine()
    took: dict[str, list[float]] = {"functional": [], "strict": [], "torch": []}
    worst = 0.0
    for i in range(WARM_UP + repeat):
        tensors = inputs(plan, i)
        wide = [tensors[0][name].float() for name in ("a", "b")]
        want = torch.empty(M, N)
        times = {
            "functional": seconds(functional.call, tensors, trace=False),
            "torch": seconds(torch.mm, *wide, out=want),
        }
        difference = torch.linalg.norm(tensors[0]["out"] - want) / torch.linalg.norm(want)
        worst = max(worst, float(difference))
        times["strict"] = seconds(traced_and_replayed, strict, tensors, machine)
        for name, each in times.items():
            if i >= WARM_UP:
                took[name].append(each)
    functional.close()
    strict.close()
    middle = {name: statistics.median(each) for name, each in took.items()}
    flops = 2.0 * M * N * K
    return {
        **{f"{name}_ms": round(each * 1e3, 2) for name, each in middle.items()},
        "functional_gflops": round(flops / middle["functional"] / 1e9, 1),
        "torch_gflops": round(flops / middle["torch"] / 1e9, 1),
        "gemm_ratio": round(middle["torch"] / middle["functional"], 3),
        "strict_times": round(middle["strict"] / middle["functional"], 2),
        "worst_difference": worst,
    }


def strict_call(op: OpName, slots: int, repeat: int) -> dict[str, float]:
    """A whole call of two ranks: strict and timed against functional."""
    plan = planned(op, 2, SIZES[op])
    functional = World(plan, AscendAccelerator(slots=slots))
    strict = World(plan, AscendAccelerator(slots=slots, strict=_ascend.Strict()))
    machine = load_machine()
    plain, checked = [], []
    for i in range(WARM_UP + repeat):
        tensors = inputs(plan, i)
        first = seconds(functional.call, tensors, trace=False)
        then = seconds(traced_and_replayed, strict, tensors, machine)
        if i >= WARM_UP:
            plain.append(first)
            checked.append(then)
    functional.close()
    strict.close()
    mine, other = statistics.median(plain), statistics.median(checked)
    return {
        "functional_ms": round(mine * 1e3, 2),
        "strict_ms": round(other * 1e3, 2),
        "strict_times": round(other / mine, 2),
    }


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
        "gemm": {f"b_{b}_major": gemm(b, cpus, repeat) for b in ("row", "column")},
        "strict": {
            op: strict_call(op, cpus, max(3, repeat // 3))
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
            "shape": {"m": M, "n": N, "k": K},
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
