"""What a call is remembered by: all that its checks see of the arguments, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mkernel.errors import ShapeError
from mkernel.ops.common import checked, tensor_signature
from mkernel.plan.two_generation_cache import TwoGenerationCache

PLAIN = torch.zeros(64, 64)

OTHERS: dict[str, Callable[[], object]] = {
    "shape": lambda: torch.zeros(64, 72),
    "strides": lambda: torch.zeros(64, 64).t(),
    "rows with gaps": lambda: torch.zeros(64, 128)[:, :64],
    "dtype": lambda: torch.zeros(64, 64, dtype=torch.float16),
    "device": lambda: torch.zeros(64, 64, device="meta"),
    "layout": lambda: torch.zeros(64, 64).to_sparse(),
    "none": lambda: None,
    "no tensor": lambda: [[0.0] * 64] * 64,
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_checks_see_tells_arguments_apart(other: str) -> None:
    assert tensor_signature(OTHERS[other]()) != tensor_signature(PLAIN)


def test_what_is_no_tensor_is_told_apart_by_its_kind() -> None:
    assert tensor_signature(None) != tensor_signature([0.0])
    assert tensor_signature([1.0]) == tensor_signature([0.0])


def test_what_checks_do_not_see_is_alike() -> None:
    assert tensor_signature(torch.ones(100, 64)[3:67]) == tensor_signature(
        PLAIN
    )  # values, and where it lies
    assert hash(tensor_signature(torch.ones(64, 64))) == hash(tensor_signature(PLAIN))


def test_only_what_passed_is_remembered() -> None:
    world: Any = SimpleNamespace(checked=TwoGenerationCache())
    seen: list[str] = []

    def refuse() -> str:
        seen.append("refused")
        raise ShapeError("a", "it", "another")

    for _ in range(2):
        with pytest.raises(ShapeError, match="a = it is not legal; expected another"):
            checked(world, "signature", refuse)
    for _ in range(2):
        assert checked(world, "signature", lambda: seen.append("passed") or "plan") == "plan"
    assert seen == ["refused", "refused", "passed"]
