"""What launches of ``hopper`` give native code of a tensor to prefetch, and what its starters take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hopper_calls import CONTEXT, gpus, last_rank
from test_hopper_schedule import with_few_rows

from mkernel.backends.accelerators.cuda import device_session, prefetch
from mkernel.backends.accelerators.cuda.collectives import all_reduce, norm
from mkernel.backends.accelerators.cuda.device_session import DeviceSession
from mkernel.backends.accelerators.cuda.gemm import library, products
from mkernel.backends.accelerators.cuda.starters import STARTED, SUMMED
from mkernel.backends.accelerators.hopper import dispatch
from mkernel.backends.accelerators.hopper.gemm import few_rows
from mkernel.backends.accelerators.hopper.gemm import fused as gemm
from mkernel.plan.arguments import Around, Norm

HEADER = Path(device_session.__file__).parent / "host/call_starter.hpp"


class Noted:
    """Stands for the native module: notes what its calls are to prefetch."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def Prefetch(self, address: int, nbytes: int) -> tuple[int, int]:
        """The bytes, as they are given."""
        return address, nbytes

    def note(self, *_: Any, **named: Any) -> Any:
        """Note what is prefetched, by whatever this stands for."""
        self.told += [named["prefetch"]] if "prefetch" in named else []
        return self

    Collective = RowsOfSums = FewRowsCalls = of_call = start = note

    def ignore(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    all_reduce = sum_rows = norm_rows = ignore


@pytest.fixture
def noted(made: Any, monkeypatch: pytest.MonkeyPatch) -> Noted:
    module = Noted(made)
    for each in (all_reduce, few_rows, gemm, library, norm, prefetch):
        monkeypatch.setattr(each, "native", lambda: module)
    monkeypatch.setattr(products, "mm", lambda a, b, out: None)
    return module


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("op", "path", "sizes"),
    [
        ("all_reduce", "auto", (8, 4096)),
        ("all_reduce", "auto", (1024, 8192)),  # in two exchanges
        ("gemm_all_reduce", "library", (8, 4096, 512)),
        ("gemm_all_reduce", "library", (1526, 5440, 512)),  # likewise
        ("gemm_all_reduce", "fused", (8, 4096, 512)),
    ],
)
def test_an_exchange_is_given_it(
    op: str, path: str, sizes: Sequence[int], normed: bool, noted: Noted
) -> None:
    around = Around(norm=Norm(True, 1e-6)) if normed else Around()
    plan = gpus(claims=with_few_rows()).plan(
        op, dict(zip("mnk", sizes, strict=False)), dtype="bfloat16", around=around, path=path
    )
    call, rows = last_rank(plan), torch.zeros(sizes[:2]).bfloat16()
    given = {"residual": rows, "residual_out": rows.clone(), "norm_weight": rows[0].clone()}
    tensors = {**call.tensors, **(given if normed else {})}
    executor = dispatch.executor_of(plan)(replace(call, tensors=tensors), CONTEXT)
    executor.start(replace(call, tensors=tensors), 5)
    assert noted.told == []
    weight = torch.zeros(100, dtype=torch.uint8)[3:]
    executor.start(replace(call, tensors={**tensors, "prefetch": weight}), 5)
    assert noted.told == [(weight.data_ptr(), 97)]


@pytest.mark.parametrize(
    ("op", "sizes", "most"),
    [
        ("all_reduce", (1, 8192), 2_316_421),  # 1.5 us and 16 KB at 370 GB/s, of 1500 GB/s
        ("all_reduce", (64, 8192), 6_500_983),
        ("all_reduce", (512, 8192), 25_165_824),
        ("gemm_all_reduce", (64, 8192, 512), 6_500_983),
    ],
)
def test_no_more_than_comes_while_ranks_exchange(op: str, sizes: Sequence[int], most: int) -> None:
    def bytes_of(nbytes: int, ranks: int = 2) -> int:
        plan = gpus(ranks).plan(op, dict(zip("mnk", sizes, strict=False)), dtype="bfloat16")
        weight = torch.empty(nbytes, dtype=torch.uint8)
        return prefetch.prefetched_bytes(Mock(plan=plan, tensors={"prefetch": weight}))

    for nbytes in (0, 1, most, most + 1):
        assert bytes_of(nbytes) == min(nbytes, most)
    assert bytes_of(most, ranks=1) == 0
    assert prefetch.prefetched_bytes(Mock(tensors={})) == 0


def test_starters_name_the_tensors_that_native_code_reads() -> None:
    listed = re.search(r"enum : int \{(.*?)\}", HEADER.read_text(), re.DOTALL)
    assert listed is not None
    names = re.findall(r"k(\w+)", listed[1])
    snake = [re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in names]
    assert tuple(snake) == STARTED
    assert ("x", *STARTED[1:]) == SUMMED


def test_a_starter_is_told_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = Mock()
    monkeypatch.setattr(device_session, "native", lambda: module)
    monkeypatch.setattr(DeviceSession, "__init__", lambda self: None)
    made, session = Mock(), DeviceSession()  # type: ignore[call-arg]
    session._started = Mock()
    again = session._again(made, {}, {"x": (8, 1)}, 0)
    assert again is not None
    assert "prefetch" in again.tensors
    module.prefetch_in.assert_not_called()
    session._again(made, {}, {"x": (8, 1)}, 97)
    module.prefetch_in.assert_called_once_with(made.starter.return_value, 97)
    made.starter.return_value = None  # Python starts such calls
    assert session._again(made, {}, {"x": (8, 1)}, 97) is None
    module.prefetch_in.assert_called_once()


def test_what_is_no_starter_prefetches_nothing(made: Any) -> None:
    for wrong in (None, 5):
        with pytest.raises(TypeError):
            made.prefetch_in(wrong, 16)
