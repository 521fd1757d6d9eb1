"""Reports of MoE dispatches' kernels to the host: the number of rows, and whether it exceeds the
capacity."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.errors import CapacityExceeded

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels

_LONGEST_PAUSE_S = 0.001
_LOOK_S = 0.05


class MoeReports:
    """The reports of one world on one rank."""

    def __init__(self) -> None:
        """Start without reports."""
        self._block: _kernels.ReportBlock | None = None

    @property
    def block(self) -> _kernels.ReportBlock:
        """The memory that kernels write to; made on first use."""
        if self._block is None:
            self._block = native().ReportBlock()
        return self._block

    def rows(self, call: int) -> int:
        """Wait for and return the rows of this rank in that call. The kernel's own waits have
        deadlines; before it starts, the user's work may be queued. RuntimeError if the device has
        failed."""
        import torch

        start = looked = time.monotonic()
        while (rows := self.block.rows(call)) is None:
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                if torch.cuda.current_stream().query() and self.block.rows(call) is None:
                    raise RuntimeError(f"the routing of call {call} ended without a word")
            time.sleep(min(_LONGEST_PAUSE_S, (now - start) / 50))
        return rows

    def refused(self) -> CapacityExceeded | None:
        """Return the error of the first call, since the last query, that had more rows than its
        capacity."""
        found = None if self._block is None else self._block.take_refusal()
        return None if found is None else CapacityExceeded(*found)
