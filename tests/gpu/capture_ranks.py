"""Defines what ranks of ``test_captures_on_gpus`` do: captures of new calls, and broken captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from calls import Work
from hopper_ranks import Shape

import mkernel


class Broken(Exception):
    """What ends a capture early."""


def captures(call: Callable[[], Any], *, breaks: bool = False) -> torch.cuda.CUDAGraph:
    """A graph of one call; Broken: the capture ends behind it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
        if breaks:
            raise Broken
    return graph


def replayed(work: Work, replays: int, what: str) -> list[str]:
    """Failures of replays of a graph of the work's call, with new inputs before each."""
    graph, failures = captures(work.call), []
    for turn in range(1, replays + 1):
        work.fill(turn)
        graph.replay()
        failures += work.failure(turn, what=what)
    mkernel.synchronize()
    return failures


def multiply() -> None:
    """Let torch make its cuBLAS handle, which it cannot while it captures."""
    one = torch.ones(8, 8, device="cuda", dtype=torch.bfloat16)
    torch.mm(one, one)
    torch.cuda.synchronize()


def new_in_a_capture(shapes: Sequence[Shape], replays: int) -> list[str]:
    """Failures of calls that are captured before any like them has run."""
    multiply()
    failures = []
    for shape in shapes:
        work = shape.work()
        work.fill(0)
        failures += replayed(work, replays, "captured when new")
    return failures


def broken_off(shapes: Sequence[Shape], replays: int) -> list[str]:
    """Failures of calls behind a capture that broke off: eager ones, and captured ones."""
    multiply()
    failures = []
    for shape in shapes:
        work = shape.work()
        for turn in range(3):
            work.fill(turn)
            try:
                captures(work.call, breaks=True)
                failures.append("a capture that broke off raised nothing")
            except Broken:
                pass
            work.fill(turn + 10)
            work.call()
            failures += work.failure(turn + 10, what="behind a broken capture")
        failures += replayed(work, replays, "captured again")
    return failures
