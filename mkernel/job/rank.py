"""One rank's part of a job: the three views, timed with fresh inputs, then checked."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from safetensors.torch import save_file

from mkernel.backends.base import View
from mkernel.current import current
from mkernel.job import verify
from mkernel.job.inputs import open_inputs
from mkernel.job.spec import JobSpec
from mkernel.launch import report
from mkernel.ops import all_gather_gemm
from mkernel.ops.validate import DTYPES

VIEWS: tuple[View, ...] = ("compute_only", "sequential", "pipelined")


@dataclass
class RankResult:
    """What a rank sends back.

    Attributes:
        digest: of the plan that was launched.
        seconds: per view, wall time of each timed call (from a common barrier to the result).
        comm_seconds: the communication kernel's wall time in each sequential call.
        errors: relative Frobenius error by view, of the last timed call.
        trace: instruction record of one pipelined call.
        nic_bytes: bytes put through the NIC in all.
    """

    digest: str = ""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    comm_seconds: list[float] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    trace: bytes | None = None
    nic_bytes: int = 0


def steps(spec: JobSpec) -> int:
    """How many progress reports rank 0 sends."""
    return len(VIEWS) * (spec.warmup + spec.iterations) + 1


def run(spec: JobSpec) -> RankResult:
    """Measure and check one rank. Collective."""
    world = current()
    inputs = open_inputs(spec, world.size)
    out = torch.empty((spec.m, spec.n), dtype=DTYPES[spec.out_dtype])
    result = RankResult()
    number = 0

    def call(view: View, trace: bool = False) -> float:
        nonlocal number
        number += 1
        a, b = inputs.a(world.rank, number), inputs.b(world.rank, number)
        out.fill_(float("nan"))
        world.barrier()
        start = time.perf_counter()
        done = all_gather_gemm.OP.call(a, b, out=out, chunk=spec.chunk, view=view, trace=trace)
        elapsed = time.perf_counter() - start
        result.digest = done.plan.digest()
        result.trace = done.record.trace or result.trace
        if view == "sequential":
            result.comm_seconds.append(done.record.times.seconds.get("comm", 0.0))
        if world.rank == 0:
            report(view)
        return elapsed

    def check(view: View) -> None:
        error = verify.all_gather_gemm(out, inputs, world.rank, world.size, number)
        result.errors[view] = max(error, result.errors.get(view, 0.0))

    for _ in range(spec.warmup):
        for view in VIEWS:
            call(view)
    for iteration in range(spec.iterations):  # views take turns: the machine's mood hits all alike
        for view in VIEWS:
            result.seconds.setdefault(view, []).append(call(view))
            if view != "compute_only" and iteration == spec.iterations - 1:
                check(view)
    call("pipelined", trace=True)
    check("pipelined")
    if world.nic is not None and world.nic.flush(world.settings.timeout_s):
        result.nic_bytes = world.nic.statistics().put_bytes
    if spec.output is not None:
        save_file({"c": out}, spec.output / f"rank{world.rank}.safetensors")
    return result
