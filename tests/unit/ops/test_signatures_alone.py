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
from mkernel.ops.gemm import GemmOp
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


def rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(64.0 * count, dtype=dtype).reshape(count, 64)


UNLIKE: dict[str, Callable[[int], Tensor]] = {
    "one row": lambda count: mkernel.gemm_all_reduce(rows(1), torch.eye(64)),
    "gaps": lambda count: mkernel.gemm_all_reduce(rows(2 * count)[::2], torch.eye(64)),
    "columns": lambda count: mkernel.gemm_all_reduce(rows(64).t()[:count], torch.eye(64)),
    "dtype": lambda count: mkernel.gemm_all_reduce(
        rows(count, torch.float64), torch.eye(64, dtype=torch.float64)
    ),
    "more columns": lambda count: mkernel.gemm_all_reduce(rows(count), torch.ones(64, 80)),
    "bias": lambda count: mkernel.gemm_all_reduce(rows(count), torch.eye(64), bias=WEIGHT),
    "dimensions": lambda count: mkernel.gemm_all_reduce(rows(count)[:, None], torch.eye(64)),
    "another op": lambda count: mkernel.gemm_reduce_scatter(rows(count), torch.eye(64)),
    "gathers": lambda count: mkernel.all_gather_gemm(rows(count), torch.eye(64)),
    "along dimension 1": lambda count: mkernel.all_gather_gemm(
        rows(3 * count).view(count, 3, 64), torch.eye(64), gather_dim=1
    ),
}


def test_calls_that_differ_by_rows_alone_are_checked_once(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, checked = GemmOp.check, []
    monkeypatch.setattr(GemmOp, "check", lambda *given: checked.append(1) or check(*given))

    def checks(call: Callable[[int], Tensor], count: int) -> int:
        checked.clear()
        alone.path.forget()  # else native code makes a call that it knows
        found = call(count)
        wanted = rows(count).sum(1) if found.shape[-1] == 80 else None
        if wanted is not None:
            torch.testing.assert_close(found, wanted[:, None].expand(count, 80))
        return len(checked)

    alone.families.clear()

    def usual(count: int) -> Tensor:
        found = mkernel.gemm_all_reduce(rows(count), torch.eye(64))
        torch.testing.assert_close(found, rows(count))
        return found

    assert [checks(usual, count) for count in (8, 12, 3, 40, 2)] == [1, 0, 0, 0, 0]
    for name, call in UNLIKE.items():
        assert checks(call, 8) == 1, name
        assert checks(call, 12) == (name == "one row"), name
    assert checks(usual, 7) == 0
