"""A call is remembered by all that its checks and its plan see of the arguments, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from python_calls import plans
from torch import Tensor

import mkernel
from mkernel.errors import MkernelError
from mkernel.ops.registration import ops
from mkernel.world.world import World

A, B = torch.zeros(64, 64), torch.zeros(64, 64)
WEIGHT = torch.zeros(64)

OTHERS: dict[str, Callable[[], object]] = {
    "shape": lambda: mkernel.gemm_all_reduce(torch.zeros(32, 64), B),
    "more dimensions": lambda: mkernel.gemm_all_reduce(torch.zeros(1, 64, 64), B),
    "strides": lambda: mkernel.gemm_all_reduce(A.t(), B),
    "strides of b": lambda: mkernel.gemm_all_reduce(A, B.t()),
    "rows with gaps": lambda: mkernel.gemm_all_reduce(torch.zeros(64, 128)[:, :64], B),
    "dtype": lambda: mkernel.gemm_all_reduce(A.double(), B.double()),
    "out_dtype": lambda: mkernel.gemm_all_reduce(A, B, out_dtype=torch.float64),
    "another tensor": lambda: mkernel.gemm_all_reduce(A, B, bias=WEIGHT),
    "an output": lambda: mkernel.gemm_all_reduce(A, B, out=torch.zeros(64, 64)),
    "an integer": lambda: mkernel.gemm_all_reduce(A, B, chunk=32),
    "one op's memory shared": lambda: mkernel.gemm_all_reduce(A, A),
    "another op": lambda: mkernel.gemm_reduce_scatter(A, B),
    "a number": lambda: ops.gemm_all_reduce_norm(A, B, WEIGHT, eps=0.5),
    "another number": lambda: ops.gemm_all_reduce_norm(A, B, WEIGHT, eps=0.25),
    "a list": lambda: mkernel.all_gather_gemm(A, [B]),
    "a longer list": lambda: mkernel.all_gather_gemm(A, [B, B]),
    "torch calls": lambda: torch.ops.mkernel.gemm_all_reduce(A, B, group=mkernel.world().name),
}


@pytest.fixture(scope="module")
def made(alone: World) -> list[int]:
    """How many calls Python made: of the first one, of the same again, and then of each other one."""
    alone.path.forget()
    found = []
    for call in (lambda: mkernel.gemm_all_reduce(A, B),) * 2 + tuple(OTHERS.values()):
        with plans(of_all=False) as planned:
            call()
        found.append(len(planned))
    return found


def test_what_differs_for_the_plan_is_another_call(made: list[int]) -> None:
    first, again, *others = made
    assert (first, again) == (1, 0)
    assert dict(zip(OTHERS, others, strict=True)) == dict.fromkeys(OTHERS, 1)


@pytest.mark.parametrize("other", [None, [[0.0]], torch.zeros(64, 64, device="meta")])
def test_what_is_wrong_is_refused_after_a_call_that_was_right(alone: World, other: Any) -> None:
    for _ in range(2):
        mkernel.gemm_all_reduce(A, B)
        with pytest.raises(MkernelError):
            mkernel.gemm_all_reduce(other, B)


def test_values_are_no_part_of_it(alone: World) -> None:
    def call(value: float) -> Tensor:
        return mkernel.gemm_all_reduce(torch.full((64, 64), value), torch.eye(64))

    call(1.0)
    with plans(of_all=False) as planned:
        assert float(call(3.0).max()) == 3.0
    assert planned == []
