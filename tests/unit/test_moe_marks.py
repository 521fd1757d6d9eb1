"""Whose handle it is, where only the device could be asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mkernel.ops import moe

HERE, THERE = (moe.mark(SimpleNamespace(name=name)) for name in ("here", "there"))  # type: ignore[arg-type]


class OnDevice:
    """Words whose values are not looked at."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, words: torch.Tensor) -> None:
        self._words = words

    def __getattr__(self, name: str) -> Any:
        assert name in ("untyped_storage", "is_inference", "_version"), f"{name} would wait"
        return getattr(self._words, name)


@pytest.mark.parametrize("inference", [False, True])
def test_handles_of_this_process_are_known_by_their_memory(inference: bool) -> None:
    with torch.inference_mode(inference):
        words, others = torch.zeros(4), torch.zeros(4)
        for each, world in ((words, HERE), (others, THERE)):
            moe.remember(each, world)
        assert not moe.is_foreign(OnDevice(words), HERE)  # type: ignore[arg-type]
        assert moe.is_foreign(OnDevice(others), HERE)  # type: ignore[arg-type]
        assert moe.is_foreign(OnDevice(words), THERE)  # type: ignore[arg-type]


def test_what_is_not_known_is_not_refused() -> None:
    words = torch.zeros(4)
    moe.remember(words, THERE)
    assert not moe.is_foreign(OnDevice(words.clone()), HERE)  # type: ignore[arg-type]
    words[0] = 1  # somebody made another handle of it
    assert not moe.is_foreign(OnDevice(words), HERE)  # type: ignore[arg-type]
    before = len(moe._marked)
    del words
    assert len(moe._marked) == before - 1


def test_words_of_a_cpu_have_the_mark() -> None:
    words = torch.tensor([0, HERE], dtype=torch.int32)
    assert not moe.is_foreign(words, HERE)
    assert moe.is_foreign(words, THERE)
