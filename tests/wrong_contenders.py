"""Contenders that are wrong on purpose: the benchmark must catch each of them, not time it.

They are named ``wrong_contenders:Class`` in place of a peer. Faults of a backend, which
then are mkernel's own, are in ``mkernel.conformance.faults``.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from mkernel.harness import rank
from mkernel.harness.contenders import ATTENTION_BACKWARD, SUMS, Contender, attention
from mkernel.harness.contenders.attention import Ring
from mkernel.harness.contenders.experts import GatheredExperts
from mkernel.harness.contenders.library import GlooMatmul, NcclCublas
from mkernel.harness.problem import Inputs, Problem, Tensors
from mkernel.harness.spec import GEMMS, LOOP_CALLS

LATE_S = 0.05


class _Broken(Contender):
    """The plain library path with one promise broken."""

    ops, ops_text = GEMMS, "faults are planted in GEMM ops"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        path = NcclCublas if problem.device.type == "cuda" else GlooMatmul
        self._honest = path(problem)


class FinishesLate(_Broken):
    """Goes on after the call has returned: on another stream, or on a CPU when the next call comes."""

    name = "finishes_late"
    _late: tuple[torch.Tensor, torch.Tensor] | None = None

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        out = outputs["out"]
        result = self._honest.call(inputs, {"out": torch.empty_like(out)})["out"]
        if out.is_cuda:
            cuda: Any = torch.cuda
            side = cuda.Stream(out.device)
            side.wait_stream(cuda.current_stream())
            with cuda.stream(side):
                cuda._sleep(int(LATE_S * 2e9))
                out.copy_(result)
                result.record_stream(side)
        else:
            if self._late is not None:
                self._late[0].copy_(self._late[1])
            self._late = out, result
        return outputs


class ReturnsPrevious(_Broken):
    """From the second call on, the result is the previous call's: it does not wait for this one's."""

    name = "returns_previous"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._results: list[torch.Tensor] = []  # all of them: a captured graph reads what was there

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        self._results.append(self._honest.call(inputs, outputs)["out"].clone())
        if len(self._results) > 1:
            outputs["out"].copy_(self._results[-2])
        return outputs


class ForgetsTheResidual(_Broken):
    """Normalises the sum alone."""

    name = "forgets_the_residual"
    ops, ops_text = SUMS, "sums have a residual"

    def place(self, inputs: Inputs, outputs: Tensors) -> None:
        self._honest.place(inputs, outputs)

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        without = {**inputs, "residual": torch.zeros_like(inputs["residual"])}
        return self._honest.call(without, outputs)


class SkipsHalf(_Broken):
    """Writes half of its rows."""

    name = "skips_half"

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        out = outputs["out"]
        rows = len(out) // 2
        out[:rows] = self._honest.call(inputs, {"out": torch.empty_like(out)})["out"][:rows]
        return outputs


class OneWrongRow(_Broken):
    """In one call of a loop, which is none of the last, one row is another one."""

    name = "one_wrong_row"
    _calls = 0

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        out = self._honest.call(inputs, outputs)["out"]
        if self._calls % LOOP_CALLS == 6:
            out[len(out) // 3] = out[0].clone()
        self._calls += 1
        return {"out": out}


class LeavesElement(_Broken):
    """Leaves one element as it was: the one which that changes least, so that only what was put there
    on purpose tells it from a right one."""

    name = "leaves_element"

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        before = outputs["out"].clone()
        result = self._honest.call(inputs, outputs)["out"]
        at = int((result - before).abs().nan_to_num(nan=float("inf")).argmin())
        result.view(-1)[at] = before.view(-1)[at]
        return {"out": result}


class Raises(_Broken):
    """Raises in the second call, on every rank."""

    name = "raises"
    _calls = 0

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        self._calls += 1
        if self._calls == 2:
            raise RuntimeError("planted")
        return self._honest.call(inputs, outputs)


class Hangs(_Broken):
    """Rank 0 never returns from the fourth call."""

    name = "hangs"
    _calls = 0

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        self._calls += 1
        while self._calls == 4 and self.problem.rank == 0:
            time.sleep(1)
        return self._honest.call(inputs, outputs)


class FailsAlone(_Broken):
    """Rank 0 fails in a check in which the others wait for it; a group is not destroyed while any
    rank waits in it, as NCCL's is not."""

    name = "fails_alone"

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        return self._honest.call(inputs, outputs)

    def judged(self, results: Tensors, inputs: Inputs) -> Tensors:
        if self.problem.rank == 0:
            waits = {**vars(distributed), "destroy_process_group": lambda: time.sleep(600)}
            vars(rank)["distributed"] = SimpleNamespace(**waits)
            raise RuntimeError("planted")
        distributed.barrier()
        return self._honest.judged(results, inputs)


class RowsOfTheNextExpert(GatheredExperts):
    """Every expert multiplies by the weights of the one before."""

    name = "rows_of_the_next_expert"

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        w = "w" if self.op == "moe_dispatch_gemm" else "w2"
        return super().call({**inputs, w: inputs[w].roll(1, 0)}, outputs)


class StaleKeys(Ring):
    """Attends to the keys of the call before."""

    name = "stale_keys"
    _before: torch.Tensor | None = None

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        k = inputs["k"]
        stale, self._before = self._before, k.clone()
        return super().call({**inputs, "k": k if stale is None else stale}, outputs)


class MergesWithoutRescaling(Ring):
    """Adds what parts found as if each had all keys."""

    name = "merges_without_rescaling"

    def merged(self, parts: list[attention.Part], dtype: torch.dtype) -> Tensors:
        right = attention.merged(parts, dtype)
        for each in parts[1:]:
            right["out"][:, :, each.first :] = each.out
        return right


class SumsOfTheOwnKeys(Contender):
    """Gradients whose weights are those of queries that see the own keys alone."""

    name = "sums_of_the_own_keys"
    ops, ops_text = (ATTENTION_BACKWARD,), "for gradients of attention"

    def before(self, inputs: Inputs) -> None:
        attention.forward(self.problem, inputs)
        own = attention.own(inputs)
        alone = attention.part(self.problem, inputs["q"], own, self.problem.rank)
        inputs["lse"].copy_(alone.lse)

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        return attention.backward(self.problem, inputs)
