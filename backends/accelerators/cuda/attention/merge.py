"""The merge of queries' results on parts of the keys, and memory for results that are merged
already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mkernel.backends.accelerators.cuda.attention.library import Seen
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.native_kernels import native

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


@dataclass
class Found:
    """The results of some queries so far.

    Attributes:
        out, lse: memory of the merged results, float32, packed. merged: True if they hold any.
        parts: results that are not merged yet.
    """

    out: torch.Tensor
    lse: torch.Tensor
    merged: bool = False
    parts: list[Seen] = field(default_factory=list)

    @classmethod
    def of_rows(cls, rows: int, like: torch.Tensor) -> Found:
        """Make an empty one, with memory for ``rows`` of the queries whose results ``like`` [B, H,
        R, D] holds."""
        batch, heads, _, width = like.shape
        made = torch.empty(
            batch * heads * rows * (width + 1), dtype=torch.float32, device=like.device
        )
        sums = batch * heads * rows
        return cls(
            made[:-sums].view(batch, heads, rows, width), made[-sums:].view(batch, heads, rows)
        )

    def clear(self) -> None:
        """Forget the results, because other queries follow."""
        self.merged, self.parts = False, []


@dataclass(frozen=True)
class Merge:
    """The merge of parts on a device, by a kernel of ``blocks`` blocks."""

    context: DispatchContext
    blocks: int

    def finish(
        self,
        parts: Sequence[Seen],
        out: torch.Tensor,
        lse: torch.Tensor,
        world: _kernels.DeviceWorld,
        stream: int,
        *,
        ends: bool,
        before: Found | None = None,
    ) -> None:
        """Merge parts, and what was merged ``before``, into ``out`` [B, H, R, D] and ``lse`` [B, H,
        R], whose heads' rows are packed. ``ends``: the merge also ends the call."""
        made = native()
        merged = before is not None and before.merged
        running = made.Running(*_addresses(before if merged else None), merged, False)
        self._queue(parts, out, lse, running, world, ends, stream)

    def keep(
        self, found: Found, out: torch.Tensor, world: _kernels.DeviceWorld, stream: int
    ) -> None:
        """Merge the parts into the memory of merged results. ``out``: the tensor for the final
        results."""
        running = native().Running(*_addresses(found), found.merged, True)
        self._queue(found.parts, out, found.lse, running, world, False, stream)
        found.parts, found.merged = [], True

    def _queue(
        self,
        parts: Sequence[Seen],
        out: torch.Tensor,
        lse: torch.Tensor,
        running: _kernels.Running,
        world: _kernels.DeviceWorld,
        ends: bool,
        stream: int,
    ) -> None:
        made = native()
        merge = made.Merge(
            [
                made.Part(
                    part.out.data_ptr(), part.out.stride()[:3], part.lse.data_ptr(), part.first
                )
                for part in parts
            ],
            out.data_ptr(),
            out.stride()[:3],
            lse.data_ptr(),
            lse.stride(1),
            tuple(out.shape),
            out.dtype == torch.float16,
            running,
        )
        made.merge_parts(self.context.device, world, merge, self.blocks, ends, stream)


def _addresses(found: Found | None) -> tuple[int, int]:
    return (0, 0) if found is None else (found.out.data_ptr(), found.lse.data_ptr())
