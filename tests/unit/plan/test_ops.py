from __future__ import annotations

import pytest

from mkernel.errors import ArgumentError, UnknownOp
from mkernel.plan.ops import ALIASES, COMPANIONS, OPS, canonical


def test_the_ops_and_their_aliases() -> None:
    assert {alias: canonical(alias) for alias in (*ALIASES, "ring_attention")} == {
        "ag_gemm": "all_gather_gemm",
        "ar": "all_reduce",
        "gemm_ar": "gemm_all_reduce",
        "gemm_rs": "gemm_reduce_scatter",
        "dispatch_gemm": "moe_dispatch_gemm",
        "gemm_combine": "moe_gemm_combine",
        "ring_attention": "ring_attention",
    }
    assert [canonical(op) for op in OPS] == list(OPS)
    assert len(OPS) == 7
    assert [canonical(op) for op in COMPANIONS] == list(COMPANIONS)


def test_spelling_is_forgiven() -> None:
    assert canonical(" AG-GEMM ") == "all_gather_gemm"


def test_an_unknown_op_lists_all_and_suggests() -> None:
    with pytest.raises(UnknownOp, match="did you mean 'ag_gemm'") as caught:
        canonical("ag_gem")
    assert all(op in str(caught.value) for op in (*OPS, *ALIASES))
    with pytest.raises(ArgumentError) as caught_other:
        canonical("zzzzzz")
    assert "did you mean" not in str(caught_other.value)
