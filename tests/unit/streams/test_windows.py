"""What a world has of windows, without a device: a stand-in for memory and the native module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from window_plans import plan

from mkernel.backends.accelerators.streams import window as windows
from mkernel.backends.accelerators.streams.window import Windows, words_of
from mkernel.errors import ArgumentError
from mkernel.plan.model import LaunchPlan


class CudaError(RuntimeError):
    pass


class Memory:
    """Memory of a device whose peers may be out of reach."""

    reachable = True

    @classmethod
    def create(cls, nbytes: int, device: int) -> tuple[str, int, int]:
        return "own", nbytes, device

    @classmethod
    def attach(cls, descriptor: dict[str, Any], device: int) -> tuple[str, int]:
        if not cls.reachable:
            raise OSError(f"device {device} cannot map a peer's memory")
        return "peer's", device


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Windows:
    monkeypatch.setattr(windows, "DeviceMemory", Memory)
    monkeypatch.setattr(windows, "native", lambda: SimpleNamespace(CudaError=CudaError))
    device: Any = SimpleNamespace(index=lambda: 1, at=lambda device: ("at", device))
    return Windows(device)


def call(of: LaunchPlan) -> Any:
    return SimpleNamespace(plan=of)


def test_all_plans_have_the_same_words(made: Windows) -> None:
    for m in (1, 2):
        needs = made.workspace(plan("all_gather_gemm", 4, m=64 * m, n=24, k=40))
        assert (needs.signals, needs.areas) == (words_of(4), (m * 64 * 40 * 4,))


def test_other_plans_have_no_words(made: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = plan("all_gather_gemm", 1, m=64, n=24, k=40)
    assert made.words(call(alone)) is None
    monkeypatch.setattr(windows, "Words", lambda call: "words")
    first = plan("all_gather_gemm", 2, m=64, n=24, k=40)
    made.workspace(first)
    assert made.words(call(first)) == "words"
    assert made.words(call(alone)) is None


def test_where_memory_or_words_fail_the_message_says_what_to_do(
    made: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(call: Any) -> None:
        raise CudaError("cudaHostRegister failed")

    with pytest.raises(OSError, match="there is none"):
        made.attach({})
    assert made.allocate(8) == ("own", 8, 1)
    assert made.attach({}) == ("peer's", 1)
    monkeypatch.setattr(Memory, "reachable", False)
    with pytest.raises(OSError, match=r"cannot map.*MKERNEL_STREAMS_COPIES=0"):
        made.attach({})
    monkeypatch.setattr(windows, "Words", refused)
    first = plan("all_gather_gemm", 2, m=64, n=24, k=40)
    made.workspace(first)
    with pytest.raises(OSError, match=r"cudaHostRegister.*MKERNEL_STREAMS_COPIES=0"):
        made.words(call(first))


def test_a_world_has_one_device(made: Windows) -> None:
    here: Any = SimpleNamespace(get_device=lambda: 1, device=torch.device("cuda", 1))
    other: Any = SimpleNamespace(get_device=lambda: 0, device=torch.device("cuda", 0))
    assert made.on({"a": other}) == ("at", other.device)  # there is no memory yet
    made.allocate(8)
    assert made.on({"a": here, "b": here}) == ("at", here.device)
    with pytest.raises(ArgumentError, match=r"b\.device = .*cuda:1"):
        made.on({"a": here, "b": other})
