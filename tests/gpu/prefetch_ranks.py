"""Defines what ranks of ``test_prefetch_on_gpus`` do: the same calls with a tensor to prefetch and
without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import calls
import torch
from calls import DEVICE, Tensors
from capture_ranks import captures
from hopper_ranks import Shape, Work

import mkernel
from mkernel.backends.accelerators.cuda.collectives import all_reduce, norm
from mkernel.backends.accelerators.cuda.device_session import DeviceSession
from mkernel.backends.accelerators.cuda.gemm import library
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.hopper.gemm import few_rows
from mkernel.backends.contracts.accelerator import Call

ALIKE = 5
"""Weights of one shape, whose calls are known from the second on."""


def weights() -> dict[str, torch.Tensor]:
    """Return tensors to prefetch, by what is special about each."""
    matrix = torch.randn(4096, 1000, device=DEVICE, dtype=torch.bfloat16)
    size = (machine().prefetch.most_bytes + (1 << 20),)
    raw = torch.randint(0, 255, size, device=DEVICE, dtype=torch.uint8)
    return {
        "a matrix": matrix,
        "a transpose": matrix.t(),
        "rows of a matrix": matrix[3:1001],
        "e4m3": matrix.to(torch.float8_e4m3fn),
        "more than the limit": raw,
        "an odd address and size": raw[1:-2],
        "its last byte": raw[-1:],
        "15 bytes": raw[16:31],
        "31 bytes": raw[17:48],
        "whole chunks": raw[: 1 << 20],
        "nothing": raw[:0],
        "a float64": torch.ones((), device=DEVICE, dtype=torch.float64),
    }


def bits(found: Tensors) -> torch.Tensor:
    """Return copies of all bytes of a call's results."""
    return torch.cat([calls.bits(each) for each in found.values()])


def called(work: Work, turn: int, **options: Any) -> Tensors:
    """Call the op on the inputs of a turn, into poisoned memory."""
    work.fill(turn)
    work.found = work._results(work.public(out=work.out, **options))
    return work.found


def hinted(
    shapes: Sequence[Shape], make: Callable[[], Mapping[str, torch.Tensor]] = weights
) -> list[str]:
    """Return failures of calls that prefetch: other bits than without, results that are wrong, or a
    tensor that was written to."""
    failures, given = [], make()
    for shape in shapes:
        work = shape.work()
        for turn, (name, weight) in enumerate(given.items()):
            before = calls.bits(weight).clone()
            wanted = bits(called(work, turn))
            for what in ("first", "known"):
                found = called(work, turn, prefetch=weight)
                if not torch.equal(bits(found), wanted):
                    failures.append(f"{shape} prefetch of {name}: other bits, {what}")
                failures += work.failure(turn, what=f"prefetch of {name}, {what}")
            if not torch.equal(calls.bits(weight), before):
                failures.append(f"{shape} prefetch of {name}: it was written to")
    mkernel.synchronize()
    return failures


def known(shapes: Sequence[Shape]) -> list[str]:
    """Return failures of calls with weights of one shape, and where native code did not start all but
    the first."""
    failures = []
    many = [torch.randn(512, 512, device=DEVICE) for _ in range(ALIKE)]
    launch = DeviceSession.launch
    for shape in shapes:
        work = shape.work()
        with mock.patch.object(
            DeviceSession, "launch", autospec=True, side_effect=launch
        ) as python:
            for turn, weight in enumerate(many):
                called(work, turn, prefetch=weight)
                failures += work.failure(turn, what="weights of one shape")
        if python.call_count != 1:
            failures.append(f"{shape}: Python made {python.call_count} calls of {ALIKE} alike")
    mkernel.synchronize()
    return failures


def in_graphs(shapes: Sequence[Shape], replays: int) -> list[str]:
    """Return failures of replayed calls that prefetch."""
    failures, given = [], weights()
    for shape in shapes:
        work = shape.work()
        called(work, 0)
        for name in ("a matrix", "more than the limit", "an odd address and size"):
            weight = given[name]
            called(work, 0, prefetch=weight)
            mkernel.synchronize()
            graph = captures(partial(_keep_results, work, weight))
            found = work.found
            for turn in range(replays):
                wanted = bits(called(work, turn))
                work.fill(turn, found)
                graph.replay()
                if not torch.equal(bits(found), wanted):
                    failures.append(f"{shape} prefetch of {name}: other bits, replayed")
                failures += work.failure(turn, found, f"prefetch of {name}, replayed")
    mkernel.synchronize()
    return failures


def _keep_results(work: Work, weight: torch.Tensor) -> None:
    work.found = work._results(work.public(out=work.out, prefetch=weight))


def faulty(shape: Shape, victim: str) -> list[str]:
    """Return what :func:`hinted` finds of calls that write to a tensor."""
    with writing(victim):
        return hinted([shape], lambda: {"a matrix": weights()["a matrix"]})


@contextmanager
def writing(victim: str) -> Iterator[None]:
    """Have launches write to the tensor of that name where they begin to prefetch."""

    def planted(call: Call) -> dict[str, Any]:
        if "prefetch" in call.tensors:
            calls.bits(call.tensors[victim]).add_(1)
        return {}

    with ExitStack() as stack:
        for module in (all_reduce, few_rows, library, norm):
            stack.enter_context(mock.patch.object(module, "prefetch_of", planted))
        stack.enter_context(mock.patch.object(DeviceSession, "_again", return_value=None))
        yield
