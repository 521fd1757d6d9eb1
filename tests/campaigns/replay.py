"""A call in a CUDA graph, replayed with fresh inputs."""

from __future__ import annotations

import torch

from mkernel.cases import Outcome
from mkernel.cases.poison import fill
from mkernel.conformance.ranks import Judge


class Replayed:
    """One call of a judge's case, captured. Its shape must have been called before."""

    def __init__(self, judge: Judge) -> None:
        case = judge.case
        self._judge = judge
        self._inputs = judge.inputs(0)
        self._outputs = case.poisoned(self._inputs)
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            self._outcome = case.call(self._inputs, self._outputs, wait=False)

    def replay(self, iteration: int) -> Outcome:
        """With the inputs of that iteration, and poisoned outputs."""
        for name, fresh in self._judge.inputs(iteration).items():
            self._inputs[name].copy_(fresh)
        for tensor in self._outputs.values():
            fill(tensor)
        self._graph.replay()
        return self._outcome
