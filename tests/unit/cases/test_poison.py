"""What outputs hold before a call is told from everything that a call may put there."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch

from mkernel.cases import case_of, poison
from mkernel.cases.base import Case

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_poison_is_counted_element_by_element(dtype: torch.dtype) -> None:
    made = poison.full((6, 10), dtype)
    assert poison.count(made) == 60
    assert poison.count(made.t()[1:4, ::2]) == 9
    made[2, 3] = 1
    assert poison.count(made) == 59
    turned = poison.fill(torch.zeros(10, 6, dtype=dtype).t()[1:])
    assert (turned.shape, poison.count(turned)) == ((5, 10), 50)


@pytest.mark.parametrize("dtype", FLOATS)
def test_poison_is_a_quiet_nan(dtype: torch.dtype) -> None:
    """A processor may turn a signalling one into another NaN on its way."""
    made = poison.full((1,), dtype)
    assert made.isnan().all()
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    mantissa = -round(math.log2(torch.finfo(dtype).eps))
    assert int(made.view(words)) >> (mantissa - 1) & 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_that_arithmetic_makes_is_no_poison(dtype: torch.dtype) -> None:
    zero, infinity = torch.zeros(2, dtype=dtype), torch.full((2,), float("inf"), dtype=dtype)
    a = torch.full((2, 2), float("nan"), dtype=dtype)
    for made in (zero / zero, infinity - infinity, infinity * zero, a @ a, a + 1, a.softmax(1)):
        assert made.isnan().all()
        assert poison.count(made) == 0
    wide = torch.full((2,), float("nan"), dtype=torch.float64)
    for source in (*(wide.to(one) for one in FLOATS), torch.from_numpy(np.full(2, np.nan))):
        assert poison.count(source.to(dtype)) == 0
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    own = torch.full((2,), torch.iinfo(words).max, dtype=words).view(dtype)  # an NVIDIA GPU's
    assert poison.count(own) == 0


class TwoRanks:
    size = 2


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """What is poisoned from now on."""
    seen: list[tuple[tuple[int, ...], torch.dtype]] = []
    fill = poison.fill

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        seen.append((tuple(tensor.shape), tensor.dtype))
        return fill(tensor)

    monkeypatch.setattr(poison, "fill", noted)
    return seen


GEMM: dict[str, tuple[int, int]] = {
    "all_gather_gemm": (64, 24),
    "gemm_reduce_scatter": (32, 24),
    "gemm_all_reduce": (64, 24),
}


@pytest.mark.parametrize("op", GEMM)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_outputs_that_the_caller_allocates_are_poisoned(
    op: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mkernel.cases.base.current", TwoRanks)
    case: Case = case_of(op)({"m": 64, "n": 24, "k": 16}, "float16", dtype)
    (out,) = case.poisoned(case.inputs(0, 2, 1)).values()
    assert (tuple(out.shape), out.dtype) == (GEMM[op], getattr(torch, dtype))
    assert poison.count(out) == out.numel()


TOKENS = {"tokens": 8, "hidden": 24, "features": 40, "experts": 4, "top_k": 2}
ALLOCATED: dict[str, tuple[dict[str, int], list[tuple[tuple[int, ...], torch.dtype]]]] = {
    "moe_dispatch_gemm": (TOKENS, [((16, 40), torch.bfloat16), ((8, 40), torch.bfloat16)]),
    "moe_combine": (TOKENS, [((8, 40), torch.bfloat16)]),
    "moe_gemm_combine": (TOKENS, [((8, 24), torch.bfloat16)]),
    "ring_attention": (
        {"batch": 2, "heads": 6, "kv_heads": 2, "sequence": 32, "head_dim": 8},
        [((2, 6, 16, 8), torch.bfloat16), ((2, 6, 16), torch.float32)],
    ),
}


@pytest.mark.parametrize("op", ALLOCATED)
def test_memory_of_the_outputs_that_ops_allocate_is_poisoned(
    op: Any,
    filled: list[tuple[tuple[int, ...], torch.dtype]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mkernel.cases.base.current", TwoRanks)
    sizes, wanted = ALLOCATED[op]
    case: Case = case_of(op)(sizes, "bfloat16", "bfloat16")
    assert case.poisoned(case.inputs(0, 2, 1)) == {}
    assert filled == [each for each in wanted for _ in range(poison._BLOCKS)], "these are small"


def test_uninitialised_memory_is_nan_on_every_thread() -> None:
    """A backend may allocate on a worker of its own."""
    seen = []

    def allocate() -> None:
        seen.append(bool(torch.empty(10, 1000).isnan().all()))

    with poison.uninitialised_is_nan():
        worker = threading.Thread(target=allocate)
        worker.start()
        worker.join()
        allocate()
    assert seen == [True, True]
    assert not torch.are_deterministic_algorithms_enabled()
