"""Invariant sums: what is legal, what a plan keeps of it, and the tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_worlds import CAPABILITIES, make

from mkernel.backends.contracts.tree import tree_sum
from mkernel.errors import ArgumentError, DtypeError, ShapeError, Unsupported
from mkernel.plan.arguments import Around, check_segments, promised
from mkernel.plan.invariance import (
    Invariant,
    encoded,
    group_of,
    pairs,
    resolved,
    segments_of,
)
from mkernel.plan.model import LaunchPlan, Scales
from mkernel.plan.traffic import traffic_of
from mkernel.settings import Settings

PROMISED = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "all_reduce")
OFF = Settings(invariant=False, invariant_segments=4)
ON = Settings(invariant=True, invariant_segments=4, invariant_partial_dtype="float32")


@pytest.mark.parametrize("segments", [0, 3, 6, 2048, True, 8.0])
def test_segments_are_a_power_of_two(segments: Any) -> None:
    with pytest.raises(ArgumentError, match=r"segments = .*a power of two, 1 to 1024"):
        Invariant(segments)


def test_partial_dtypes() -> None:
    assert Invariant(2, torch.bfloat16) == Invariant(2, "bfloat16")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="partial_dtype = float64"):
        Invariant(2, "float64")  # type: ignore[arg-type]
    assert [Invariant().partial_of(out) for out in ("float16", "bfloat16", "float32")] == [
        "float16", "bfloat16", "float32",
    ]  # fmt: skip
    assert Invariant(8, "float32").partial_of("float16") == "float32"


@pytest.mark.parametrize(
    ("wanted", "off", "on"),
    [
        (None, None, Invariant(4, "float32")),
        (True, Invariant(4), Invariant(4, "float32")),
        (False, None, None),
        (Invariant(2, "float16"), Invariant(2, "float16"), Invariant(2, "float16")),
        (Invariant(16), Invariant(16), Invariant(16)),
    ],
)
def test_an_argument_goes_before_the_settings(wanted: Any, off: Any, on: Any) -> None:
    assert [resolved(encoded(wanted), each) for each in (OFF, ON)] == [off, on]


@pytest.mark.parametrize("text", ["yes", "8 float64", "x ", "3 "])
def test_other_arguments_of_registered_ops_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError):
        resolved(text, OFF)


def test_what_a_plan_keeps_is_what_decides_bits() -> None:
    plan = make()
    claims = CAPABILITIES.model_copy(update={"invariant_ops": PROMISED, "ops": PROMISED})

    def of(op: Any, wanted: Invariant, ranks: int, out: Any = "bfloat16") -> Invariant | None:
        return promised(op, wanted, "bfloat16", out, ranks, claims, "mine")

    assert of("all_gather_gemm", Invariant(2, "float16"), 3) == Invariant(1, "float32")
    assert of("gemm_all_reduce", Invariant(8), 4) == Invariant(8, "bfloat16")
    assert of("gemm_all_reduce", Invariant(8), 4, "float32") == Invariant(8, "float32")
    assert of("all_reduce", Invariant(8, "float32"), 2) == Invariant(2, "float32")
    with pytest.raises(
        Unsupported, match="'mine' does not promise invariant results of 'moe_combine'"
    ):
        of("moe_combine", Invariant(), 2)
    with pytest.raises(ArgumentError, match=r"segments = 2 .*the world's 4 ranks divide"):
        of("gemm_reduce_scatter", Invariant(2), 4)
    with pytest.raises(ArgumentError, match=r"a world of 1, 2, 4, \.\.\. ranks, not of 6"):
        of("gemm_reduce_scatter", Invariant(8), 6)
    with pytest.raises(DtypeError, match="out_dtype = float64"):
        of("all_gather_gemm", Invariant(), 2, "float64")
    sums = make(
        op="gemm_reduce_scatter", capabilities=claims, dtype="bfloat16", out_dtype="float32",
        around=Around(invariant=Invariant(8, "bfloat16")),
    )  # fmt: skip
    usual = make(
        op="gemm_reduce_scatter", capabilities=claims, dtype="bfloat16", out_dtype="float32"
    )
    assert sums.invariant == Invariant(8, "bfloat16")
    assert sums.world_size == 4
    half, whole = (traffic_of(each).sent(0, 1) for each in (sums, usual))
    assert 2 * half == whole
    other = plan.model_copy(update={"invariant": Invariant(8, "float32")})
    more = plan.model_copy(update={"invariant": Invariant(8, "float16")})
    assert len({each.digest() for each in (plan, other, more)}) == 3
    assert LaunchPlan.model_validate_json(other.model_dump_json()) == other


def test_k_of_segments() -> None:
    check_segments("gemm_all_reduce", Invariant(8), 32, 4, None)
    check_segments("all_gather_gemm", Invariant(1), 5, 4, None)
    with pytest.raises(ShapeError, match=r"k = 48 .*a multiple of 32"):
        check_segments("gemm_all_reduce", Invariant(8), 48, 4, None)
    with pytest.raises(ShapeError, match=r"k = 128 .*a multiple of 256"):
        check_segments("gemm_reduce_scatter", Invariant(8), 128, 4, Scales(mode="block"))
    assert segments_of(4, 64) == ((0, 16), (16, 32), (32, 48), (48, 64))


@pytest.mark.parametrize(("experts", "segments"), [(64, 8), (16, 8), (6, 8), (12, 4), (2, 2)])
def test_ranks_have_whole_groups_of_experts(experts: int, segments: int) -> None:
    groups = [group_of(expert, experts, segments) for expert in range(experts)]
    assert groups == sorted(groups)
    for ranks in (ranks for ranks in (1, 2, 4) if experts % ranks == segments % ranks == 0):
        own, of = experts // ranks, segments // ranks
        assert all(group // of == expert // own for expert, group in enumerate(groups))


def test_the_tree() -> None:
    assert pairs(1) == ()
    assert pairs(8) == (((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 1), (2, 3)), ((0, 1),))
    big = 2.0**14
    ones = [torch.tensor([each]).half() for each in (big, 1, -big, 1, 1, 1, 1, 1)]
    assert tree_sum(ones) == 4  # what is outside of the node in which the large ones meet
    ones = [torch.tensor([each]).half() for each in (big, -big, 1, 1, 1, 1, 1, 1)]
    assert tree_sum(ones) == 6
    assert tree_sum(ones).dtype == torch.float16
