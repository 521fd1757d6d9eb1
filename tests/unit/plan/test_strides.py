"""How tensors lie in memory, and what a plan says that an op does around a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_worlds import make

from mkernel.errors import ArgumentError
from mkernel.plan import render
from mkernel.plan.arguments import Around, Stored, check_around, copied, rows_of, stored
from mkernel.plan.model import LaunchPlan

STEP = 8


def matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.empty(rows, columns)


WIDE = matrix(16, 64)
SHAPES: dict[str, tuple[torch.Tensor, str]] = {
    "packed": (matrix(16, 24), "packed"),
    "columns": (WIDE[:, 8:32], "pitched"),
    "columns from an odd one": (WIDE[:, 3:27], "pitched"),
    "rows": (WIDE[4:8], "packed"),
    "every second row": (WIDE[::2], "pitched"),
    "of an odd pitch": (matrix(16, 27)[:, :24], "scattered"),
    "every second column": (WIDE[:, ::2], "scattered"),
    "transposed": (WIDE.t(), "scattered"),
    "one row": (WIDE[:1, 8:32], "packed"),
    "one column": (WIDE[:, :1], "pitched"),
    "overlapping": (WIDE[:1].expand(4, 64), "scattered"),
    "closer than its width": (WIDE.as_strided((4, 24), (8, 1)), "scattered"),
    "three dimensions": (torch.empty(2, 3, 24), "packed"),
    "columns of three dimensions": (torch.empty(2, 3, 64)[..., :24], "pitched"),
    "the second one outermost": (torch.empty(3, 2, 24).movedim(0, 1), "scattered"),
    "a dimension of 1": (torch.empty(3, 1, 24).movedim(0, 1), "packed"),
    "some of the second": (torch.empty(2, 5, 24)[:, :3], "scattered"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_packed_pitched_or_scattered(name: str) -> None:
    tensor, wanted = SHAPES[name]
    assert rows_of(tensor.shape, tensor.stride(), STEP) == wanted


@pytest.mark.parametrize(
    ("b", "wanted"),
    [
        (matrix(16, 24), Stored("row", "packed")),
        (matrix(24, 16).t(), Stored("column", "packed")),
        (WIDE[:, 8:32], Stored("row", "pitched")),
        (WIDE[:, 8:32].t(), Stored("column", "pitched")),
        (WIDE[:, ::2], Stored("row", "scattered")),
        (WIDE[:, ::2].t(), Stored("column", "scattered")),
        (matrix(16, 27)[:, :24].t(), Stored("column", "scattered")),
        (matrix(1, 24), Stored("row", "packed")),
        (matrix(24, 1), Stored("row", "packed")),
        (WIDE[:, :1], Stored("row", "pitched")),
    ],
)
def test_a_matrix_is_read_as_it_lies(b: torch.Tensor, wanted: Stored) -> None:
    assert stored(b.shape, b.stride(), STEP) == wanted


def test_what_a_backend_does_not_take_is_copied() -> None:
    strides: dict[str, Any] = {"b": "pitched", "a": "pitched", "out": "scattered"}
    assert copied(strides, ()) == ("a", "b", "out")
    assert copied(strides, ("b",)) == ("a", "out")
    assert copied({"a": "packed", "b": "scattered"}, ("a", "b")) == ("b",)
    assert copied({}, ()) == ()
    for wrong in ({"c": "packed"}, {"a": "odd"}):
        with pytest.raises(ArgumentError, match="strides"):
            copied(wrong, ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "around", "argument"),
    [
        ("ring_attention", Around(copies=("a",)), "copies"),
        ("moe_combine", Around(bias=True), "bias"),
        ("gemm_all_reduce", Around(copies=("bias",)), "copies"),
        ("gemm_reduce_scatter", Around(copies=("gathered",)), "copies"),
        ("gemm_reduce_scatter", Around(products=(16,)), "products"),
        ("all_gather_gemm", Around(products=(16, 0)), "products"),
        ("all_gather_gemm", Around(products=(16, 24)), "products"),
        ("all_gather_gemm", Around(products=(8,)), "products"),
    ],
)
def test_steps_that_an_op_has_not(op: Any, around: Around, argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        check_around(op, around, 16)
    assert caught.value.argument == argument
    check_around("all_gather_gemm", Around(("a", "gathered"), True, (8, 16, 16)), 16)


def test_a_plan_says_what_happens_around_the_launch() -> None:
    plan = make()
    assert (plan.copies, plan.bias, plan.products, plan.launched) == ((), None, (), 0)
    n = plan.gemm.n
    copy = plan.model_copy(update={"copies": ("a", "out")})
    assert copy.digest() == plan.digest(), "peers see nothing of it"
    several = plan.model_copy(update={"products": (8, n, n), "bias": "after"})
    assert several.digest() != plan.digest()
    assert several.launched == 1
    assert LaunchPlan.model_validate_json(several.model_dump_json()) == several
    told = render._around(several.model_copy(update={"copies": ("b", "gathered")}))
    assert told == (
        f"copies b; launches product 1 of 8, {n}, {n} columns, then a library the others; "
        "adds the bias; copies gathered"
    )
    told = render._around(plan.model_copy(update={"copies": ("bias",), "bias": "launch"}))
    assert told == "copies bias; the launch adds the bias"
