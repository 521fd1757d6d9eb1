"""The table of which case class judges which op."""

from __future__ import annotations

from mkernel.cases.all_reduce import AllReduceCase
from mkernel.cases.attention import RingAttentionCase
from mkernel.cases.attention_backward import RingAttentionBackwardCase
from mkernel.cases.base import Case
from mkernel.cases.gemm import AllGatherGemmCase, GemmAllReduceCase, GemmReduceScatterCase
from mkernel.cases.moe import MoeCombineCase, MoeDispatchCase, MoeRowsCase
from mkernel.cases.moe_gemm_combine import MoeGemmCombineCase
from mkernel.cases.moe_layer import MoeLayerCase
from mkernel.errors import UnknownOp

_CASES: dict[str, type[Case]] = {
    case.op: case
    for case in (
        AllGatherGemmCase,
        GemmReduceScatterCase,
        GemmAllReduceCase,
        AllReduceCase,
        MoeDispatchCase,
        MoeRowsCase,
        MoeCombineCase,
        MoeGemmCombineCase,
        MoeLayerCase,
        RingAttentionCase,
        RingAttentionBackwardCase,
    )
}


def case_of(op: str) -> type[Case]:
    """Return the case class of an op's canonical name. UnknownOp."""
    try:
        return _CASES[op]
    except KeyError:
        raise UnknownOp("op", repr(op), f"one of: {', '.join(sorted(_CASES))}") from None
