"""What rank processes on GPUs run of norms in the kernel for few rows; ``sum_ranks`` has the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hopper_ranks
import torch
from sum_ranks import NormedProduct, ProductWork

import mkernel
from mkernel.backends.accelerators.hopper.few_rows import FewRowsExecutor
from mkernel.backends.accelerators.hopper.schedule import FewRowsSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.cuda.memory import bytes_at

ROW_SHARES, SHARES, SHARE_BYTES = 768, 8, 128
"""Where the words lie by which blocks meet, in a workspace (``device/workspace.cuh``)."""
LEFT = 1 << 31
"""Of such a word: a block has left (``few_rows/norm.cuh``)."""


def inside(shapes: Sequence[NormedProduct], expected: bool) -> list[str]:
    """Shapes whose norm is in the kernel, or not, against what is expected."""
    found = []
    for shape in shapes:
        work = ProductWork(shape)
        work.call()
        if work.plan.part(FewRowsSchedule).normalises != expected:
            found.append(f"{shape}: {work.plan.schedule}")
    mkernel.synchronize()
    return found


def same_bits(shape: NormedProduct, times: int) -> list[int]:
    """Checksums of a call's results, repeated on the same inputs, ranks late by turns."""
    work, sums = ProductWork(shape), []
    for turn in range(times):
        work.fill(0)
        if turn % work.world == work.rank:
            hopper_ranks.spin(hopper_ranks.LATE_S * (turn % 3) / 3)
        bits = work.call().view(torch.int16).to(torch.int64)
        weights = torch.arange(1, bits.numel() + 1, device=bits.device).view_as(bits)
        sums.append(int((bits * weights).sum()))
    assert not work.failure(0)
    return sums


def crowded(shape: NormedProduct, rounds: int) -> list[str]:
    """Failures of calls some of whose blocks find their place only long after the others: kernels of
    other streams have it. The same bits as without them."""
    work = ProductWork(shape)
    sides = [torch.cuda.Stream() for _ in range(24)]
    work.fill(0)
    alone = work.call().clone()
    failures = work.failure(0)
    for turn in range(rounds):
        mkernel.synchronize()
        torch.cuda.synchronize()
        for side in sides:
            with torch.cuda.stream(side):
                hopper_ranks.spin(0.0005)
        work.fill(0)
        if not torch.equal(work.call(), alone):
            failures.append(f"{shape} turn {turn}: other bits in a crowd")
    mkernel.synchronize()
    return failures


def planted(shape: NormedProduct, word: int) -> list[str]:
    """Failures of calls before which every word by which blocks meet is set."""
    started: Any = FewRowsExecutor.start

    def start(self: FewRowsExecutor, call: Call, stream: int) -> None:
        words = bytes_at(call.workspace + ROW_SHARES, SHARES * SHARE_BYTES).view(torch.int64)
        words.view(SHARES, -1)[:, 0] += word
        started(self, call, stream)

    work, failures = ProductWork(shape), []
    FewRowsExecutor.start = start  # type: ignore[method-assign]
    try:
        for turn in range(4):
            work.fill(turn)
            work.call()
            failures += work.failure(turn)
    finally:
        FewRowsExecutor.start = started  # type: ignore[method-assign]
    mkernel.synchronize()
    return failures
