"""Faults of GEMM+AllReduce that travels by mail: of few rows, and of tiles of more rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import calls
import torch
from hopper_ranks import Work

import mkernel
from mkernel.backends.accelerators.cuda.memory import bytes_at
from mkernel.backends.accelerators.hopper.gemm import few_rows
from mkernel.backends.accelerators.hopper.gemm.few_rows import FewRowsExecutor
from mkernel.backends.accelerators.hopper.gemm.fused import Operands

STALE, HALF, ELSEWHERE = "mail that was there before", "half of a product", "rows of the next tile"
FAULTS = (STALE, HALF, ELSEWHERE)
"""Rank 0 finds the first one, and no other rank does; it sends the others, which all ranks see. The
calls after the first one show that its mail is gone."""
_TILE_ROWS = 128
_SOME = 0x3C
"""A byte of mail that has come: no word of such bytes is zero."""


@contextmanager
def planted(fault: str, work: Work) -> Iterator[None]:
    """Plant it in the calls of a shape that names its path: Python starts each of these."""
    from collective_ranks import MAIL  # asks for GPUs, which a rank may only once it has its own

    start, call, of, world = FewRowsExecutor.start, work.call, Operands.of, mkernel.world()
    mail: list[torch.Tensor] = []

    def started(self: Any, given: Any, stream: int) -> None:
        mail.append(bytes_at(given.workspace, MAIL.stop)[MAIL])
        with ExitStack() as stack:
            if work.rank == 0 and fault == STALE:
                mail[0].fill_(_SOME)
            if work.rank == 0 and fault == HALF:
                stack.enter_context(mock.patch.object(self, "_calls", _ending_early(self)))
            if work.rank == 0 and fault == ELSEWHERE:
                found = of(given)
                moved = found._replace(a=found.a.roll(_TILE_ROWS, 0))
                stack.enter_context(mock.patch.object(Operands, "of", return_value=moved))
            start(self, given, stream)

    def alone() -> Any:
        """Let rank 0's call end before the others begin."""
        if work.rank != 0:
            world.barrier()
        found = call()
        torch.cuda.synchronize()
        if work.rank == 0:
            world.barrier()
        return found

    with (
        mock.patch.object(FewRowsExecutor, "start", started),
        mock.patch.object(work, "call", alone if fault == STALE else call),
    ):
        yield
    assert len(mail) == 1, f"Python started {len(mail)} calls by mail, not one"
    if fault == STALE:
        world.barrier()  # what the others sent after rank 0's call has come
        if work.rank == 0:
            mail[0].zero_()
            torch.cuda.synchronize()
        world.barrier()


def _ending_early(executor: Any) -> Any:
    """Return the calls of a kernel whose products end after half of their steps."""
    plan, made = executor._plan, few_rows.native()

    def shorter(**given: Any) -> Any:
        return made.Product(**{**given, "k": given["k"] // 16 * 8})

    with calls.native_with(few_rows, Product=shorter):
        half = few_rows._product(plan)
    schedule = few_rows._schedule(plan)
    return made.FewRowsCalls(executor._context.device, executor._world, half, schedule)
