"""DeepEP as a peer of the MoE ops: named in every row, with the reason why it has no figure."""

from __future__ import annotations

from importlib.util import find_spec

from mkernel.cases.moe_layer import OP as MOE_LAYER
from mkernel.errors import Unsupported
from mkernel.harness.contender import Contender
from mkernel.harness.problem import Inputs, Problem, Tensors

_OPS = ("moe_dispatch_gemm", "moe_gemm_combine", MOE_LAYER)
_ABSENT = (
    "deep_ep is not installed: it is built from source against the torch that is here, which no "
    "machine with figures in this repository could do without a network"
)
_UNCALLED = (
    "deep_ep is installed, but nothing here calls it yet: no machine was at hand to run it on"
)


class DeepEp(Contender):
    """Takes no part: it could be built nowhere, and a call that never ran would be no peer."""

    name = "deepep"

    @classmethod
    def unusable(cls, problem: Problem) -> str | None:
        if problem.op not in _OPS:
            return "for products of experts"
        return _UNCALLED if find_spec("deep_ep") else _ABSENT

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        raise Unsupported(_UNCALLED)
