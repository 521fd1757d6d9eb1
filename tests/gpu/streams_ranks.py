"""What rank processes of test_streams_windows run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import calls
import torch
from hopper_ranks import Shape

import mkernel
from mkernel.backends.accelerators.streams.window import Window, Words
from mkernel.errors import ArgumentError


def counted(shapes: Sequence[Shape]) -> tuple[list[str], int]:
    """Failures of one call each, and the puts of this rank."""
    puts = []
    put = Window.put

    def counting(window: Window, *arguments: Any) -> None:
        puts.append(arguments)
        put(window, *arguments)

    Window.put = counting  # type: ignore[method-assign]
    try:
        return calls.judged(shapes, 3), len(puts)
    finally:
        Window.put = put  # type: ignore[method-assign]


def hasty(shape: Shape, rounds: int) -> int:
    """How many of so many calls are wrong where streams do not wait for what peers put; ranks are
    late by turns."""
    Words.wait = lambda *arguments: None  # type: ignore[method-assign]
    return len(calls.skewed([shape], rounds, 1))


def own_tensors() -> tuple[str, float, str]:
    """(device of symmetric memory, error of a call into it, what a tensor elsewhere is told)."""
    world = mkernel.world()
    a = mkernel.empty((64, 64), torch.bfloat16)
    out = mkernel.empty((64 * world.size, 64), torch.bfloat16)
    a.fill_(world.rank + 1)
    out.fill_(float("nan"))
    mkernel.all_gather_gemm(a, torch.eye(64, device=a.device, dtype=a.dtype), out=out)
    wanted = torch.arange(1, world.size + 1, device=a.device).repeat_interleave(64)
    error = float((out.float() - wanted[:, None]).abs().max())
    other = torch.device("cuda", (world.rank + 1) % torch.cuda.device_count())
    elsewhere = torch.ones(64, 64, device=other, dtype=a.dtype)
    try:
        mkernel.all_gather_gemm(elsewhere, elsewhere)
        told = "nothing"
    except ArgumentError as refused:
        told = str(refused)
    return str(a.device), error, told
