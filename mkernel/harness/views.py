"""One rank of ``mkernel run``: the op's three views take turns, then one call is traced.

Every call gets poisoned outputs (and fresh inputs, unless they come from files), and starts from a
barrier. The result of every timed call of a communicating view is checked at once, outside the timing,
so one wrong call fails the job. The traced call at the end is not timed and can afford to have torch
fill what the op allocates. MoE is timed as what a layer does: dispatch and combine together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from safetensors.torch import save_file

from mkernel.backends.contracts.instrumented import View
from mkernel.cases import Comparison, Outcome
from mkernel.cases.gemm import GemmCase
from mkernel.cases.poison import uninitialised_is_nan
from mkernel.harness.contenders import Contender
from mkernel.harness.problem import Inputs, Problem, Tensors
from mkernel.harness.protocol import HostStopwatch
from mkernel.harness.run_spec import RunSpec
from mkernel.harness.turns import Rotation, Turns
from mkernel.harness.work import OneCall
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


def steps(spec: RunSpec) -> int:
    """How many progress reports rank 0 sends."""
    return len(VIEWS) * (spec.warmup + spec.iterations) + 1


def run(spec: RunSpec) -> RankResult:
    """Measure and check one rank. Collective."""
    world = current()
    case = spec.opened()
    result = RankResult()
    views = _Views(
        spec, Problem(case, world.rank, world.size, torch.device(world.accelerator.device)), result
    )
    traced = views.measure()
    if world.nic is not None and world.nic.flush(world.settings.timeout_s):
        result.nic_bytes = world.nic.statistics().put_bytes
    if spec.output is not None:
        keys = _GEMM_KEY if isinstance(case, GemmCase) else {}
        save_file(
            {keys.get(name, name): _packed(each) for name, each in traced.items()},
            spec.output / f"rank{world.rank}.safetensors",
        )
    return result


class _InView(Contender):
    """The op in one view of it."""

    def __init__(self, problem: Problem, view: View) -> None:
        super().__init__(problem)
        self._view = view
        self.trace = False
        self.outcome: Outcome | None = None

    def promised(self) -> tuple[str, ...] | None:
        return () if self._view == "compute_only" else None

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        case = self.problem.case
        self.outcome = case.call(inputs, outputs, view=self._view, trace=self.trace)
        return dict(self.outcome.outputs)

    def limits(self) -> dict[str, float]:
        return self.problem.case.tolerances()


class _Views(Rotation):
    """The views take turns in their order: the machine's mood hits all alike."""

    def __init__(self, spec: RunSpec, problem: Problem, result: RankResult) -> None:
        watch = HostStopwatch(current().barrier, lambda: None)
        super().__init__(problem, watch, warmup=spec.warmup, iterations=spec.iterations)
        self._result = result
        self._contenders = {view: _InView(problem, view) for view in VIEWS}
        for view, contender in self._contenders.items():
            self.found[view] = Turns()
            self.entered[view] = OneCall(contender)

    def measure(self) -> Tensors:
        """All turns, then the traced call, whose outputs it returns."""
        found = self.take_turns()
        contender = self._contenders["pipelined"]
        (wanted,) = self.entered["pipelined"].prepare(self.turn + 1)
        contender.trace = True
        current().barrier()
        with uninitialised_is_nan():
            (outputs,) = self.entered["pipelined"].run()
        self.done("pipelined")
        self.check("pipelined", wanted, outputs)
        checked = Turns()
        for view in VIEWS:
            self._result.seconds[view] = found[view].seconds
            checked.add(found[view].checks)
        self._result.checks = checked.checks
        return outputs

    def done(self, name: str) -> None:
        contender = self._contenders[cast(View, name)]
        outcome, result = contender.outcome, self._result
        assert outcome is not None
        result.digest = outcome.plan.digest()
        if contender.trace:
            result.traces = outcome.traces
        else:
            result.kernels[name] = outcome.seconds
        if name == "sequential":
            result.comm_seconds.append(outcome.seconds.get("comm", 0.0))
        if self.problem.rank == 0:
            report(name)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that shares no memory, as the file format asks."""
    return tensor.cpu().clone(memory_format=torch.contiguous_format)
