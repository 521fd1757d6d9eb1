"""One rank's part of a job: calls in three views, each timed and checked; then one traced call.

Every call gets poisoned outputs (and fresh inputs, unless they come from files), and starts from a
barrier. The result of every timed call of a communicating view is checked at once, outside the timing,
so one wrong call fails the job. The traced call at the end is not timed and can afford to have torch
fill what the op allocates. MoE is timed as what a layer does: dispatch and combine together.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from safetensors.torch import save_file

from mkernel.backends.contracts.instrumented import View
from mkernel.cases import Comparison, Outcome
from mkernel.cases.gemm import GemmCase
from mkernel.cases.poison import uninitialised_is_nan
from mkernel.harness.job_spec import JobSpec
from mkernel.launch import report
from mkernel.world.lifecycle import current

VIEWS: tuple[View, ...] = ("compute_only", "sequential", "pipelined")

_GEMM_KEY = {"out": "c"}
"""The file's name of a GEMM's result; other outputs are called as in their op."""


@dataclass
class RankResult:
    """What a rank sends back.

    Attributes:
        digest: of the plan that was launched (MoE: of the dispatch).
        seconds: per view, wall time of each timed call (from a common barrier to the result).
        kernels: per view, wall time of the last timed call's ``comm`` and ``compute``.
        comm_seconds: the communication's wall time in each sequential call.
        checks: by output, the comparisons of all calls that were checked, added up.
        traces: instruction records of one pipelined call, where the backend keeps them (MoE: two,
            the dispatch's and the combine's).
        nic_bytes: bytes put through the NIC in all.
    """

    digest: str = ""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    kernels: dict[str, dict[str, float]] = field(default_factory=dict)
    comm_seconds: list[float] = field(default_factory=list)
    checks: dict[str, Comparison] = field(default_factory=dict)
    traces: tuple[bytes, ...] = ()
    nic_bytes: int = 0


def steps(spec: JobSpec) -> int:
    """How many progress reports rank 0 sends."""
    return len(VIEWS) * (spec.warmup + spec.iterations) + 1


def run(spec: JobSpec) -> RankResult:
    """Measure and check one rank. Collective."""
    world = current()
    case = spec.opened()
    device = world.accelerator.device
    result = RankResult()
    number = 0

    def call(view: View, trace: bool = False) -> tuple[Outcome, float]:
        nonlocal number
        number += 1
        drawn = case.inputs(world.rank, world.size, number)
        tensors = {name: tensor.to(device) for name, tensor in drawn.items()}
        outputs = case.poisoned(tensors)
        world.barrier()
        start = time.perf_counter()
        with uninitialised_is_nan() if trace else nullcontext():
            outcome = case.call(tensors, outputs, view=view, trace=trace)
        elapsed = time.perf_counter() - start
        result.digest = outcome.plan.digest()
        if trace:
            result.traces = outcome.traces
        else:
            result.kernels[view] = outcome.seconds
        if view == "sequential":
            result.comm_seconds.append(outcome.seconds.get("comm", 0.0))
        if world.rank == 0:
            report(view)
        return outcome, elapsed

    def check(outcome: Outcome) -> None:
        for name, found in case.judge(outcome, world.rank, world.size, number).items():
            before = result.checks.get(name)
            result.checks[name] = found if before is None else before + found

    for _ in range(spec.warmup):
        for view in VIEWS:
            call(view)
    for _ in range(spec.iterations):  # views take turns: the machine's mood hits all alike
        for view in VIEWS:
            outcome, elapsed = call(view)
            result.seconds.setdefault(view, []).append(elapsed)
            if view != "compute_only":
                check(outcome)
    outcome, _ = call("pipelined", trace=True)
    check(outcome)
    if world.nic is not None and world.nic.flush(world.settings.timeout_s):
        result.nic_bytes = world.nic.statistics().put_bytes
    if spec.output is not None:
        keys = _GEMM_KEY if isinstance(case, GemmCase) else {}
        save_file(
            {keys.get(name, name): _packed(each) for name, each in outcome.outputs.items()},
            spec.output / f"rank{world.rank}.safetensors",
        )
    return result


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that shares no memory, as the file format asks."""
    return tensor.cpu().clone(memory_format=torch.contiguous_format)
