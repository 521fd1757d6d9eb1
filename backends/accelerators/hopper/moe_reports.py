"""What kernels of MoE dispatches tell the host: how many rows there are, and if they are too many."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mkernel.backends.accelerators.hopper.native import native
from mkernel.errors import CapacityExceeded

if TYPE_CHECKING:
    from mkernel.backends.accelerators.hopper import _hopper

_LONGEST_PAUSE_S = 0.001
_LOOK_S = 0.05


class MoeReports:
    """Of one world on one rank."""

    def __init__(self) -> None:
        """Nothing was told yet."""
        self._block: _hopper.ReportBlock | None = None

    @property
    def block(self) -> _hopper.ReportBlock:
        """What kernels write to; made when it is first used."""
        if self._block is None:
            self._block = native().ReportBlock()
        return self._block

    def rows(self, call: int) -> int:
        """Rows of this rank in that call, once they are known. The kernel's own waits have deadlines;
        before it starts, the user's work may be queued. RuntimeError where the device has failed."""
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
        """Of the first call since this was last asked that had more rows than its capacity."""
        found = None if self._block is None else self._block.take_refusal()
        return None if found is None else CapacityExceeded(*found)
