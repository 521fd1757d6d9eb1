"""The products of experts by torch, between the dispatch and the combine of this backend.

Data flow:
  dispatch+GEMM   tokens ──dispatch──▶ rows ──``torch._grouped_mm``──▶ outputs
  GEMM+combine    h ──``torch._grouped_mm``──▶ rows ──combine──▶ the tokens' ranks
Rows that are nobody's, up to a capacity, count as the last expert's: they are zero, and so are their
products with finite weights.

Errors. Products are rounded to the output's dtype, and so travel by slot. Sums that return by rank are
float32 until they are rounded to ``partial_dtype``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mkernel.backends.accelerators.cuda.moe.executors import (
    CombineBase,
    RowsExecutor,
    returns_workspace,
)
from mkernel.backends.accelerators.cuda.schedule import LibraryCombineSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace, aligned
from mkernel.errors import Unsupported
from mkernel.plan.model import DTYPE_BYTES, GemmCombineShape, LaunchPlan, MoeShape

_IN_GRAPHS = ((9, 0), (10, 0))
"""Compute capabilities on which torch has a kernel for all groups, of bfloat16; on others it reads on
the host where they end."""


class LibraryDispatchExecutor(RowsExecutor):
    """The executor of one plan's MoE dispatch+GEMM calls in a world, whose product is torch's."""

    def start(self, call: Call, stream: int) -> Mapping[str, Any]:
        """Queue one call on a stream; the host waits as for a dispatch without a product."""
        shape = self._plan.shape
        assert isinstance(shape, MoeShape)
        _expect_no_graph(self._plan)
        found = self._dispatched(call, stream)
        rows = found.pop("rows")
        ends = _ends(call, shape.experts // self._plan.world_size, len(rows))
        return {**found, "outputs": _product(rows, aligned(call.tensors["w"]), ends)}


class LibraryCombineExecutor(CombineBase):
    """The executor of one plan's MoE GEMM+combine calls in a world, whose product is torch's."""

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that GEMM+combine needs. Unsupported."""
        shape, how = plan.shape, plan.part(LibraryCombineSchedule)
        assert isinstance(shape, GemmCombineShape)
        by_rank = how.returns == "ranks"
        row_bytes = shape.hidden * DTYPE_BYTES[shape.partial_dtype if by_rank else plan.dtype]
        return returns_workspace(plan, row_bytes, by_rank=by_rank)

    def start(self, call: Call, stream: int) -> None:
        """Queue one call on a stream."""
        plan, how = self._plan, self._plan.part(LibraryCombineSchedule)
        shape, h, w2 = plan.shape, aligned(call.tensors["h"]), aligned(call.tensors["w2"])
        assert isinstance(shape, GemmCombineShape)
        _expect_no_graph(plan)

        experts = shape.experts // plan.world_size
        if how.returns == "slots":
            y = _product(h, w2, _ends(call, experts, len(h)))
            self._by_slot(call, stream, y, how.sum_blocks)
            return
        wide = shape.partial_dtype != plan.dtype

        def results() -> torch.Tensor:
            y = _product(h, w2, _ends(call, experts, len(h)))
            return y.float() if wide else y

        row_bytes = shape.hidden * DTYPE_BYTES[shape.partial_dtype]
        self._by_rank(call, stream, row_bytes, results, how.sum_blocks, wide=wide)


def _product(rows: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return rows [R, K] times their experts' ``w`` [E/W, K, N]."""
    if not len(rows):
        return rows.new_empty((0, w.shape[2]))
    if len(rows) == 1:  # its stride may be any
        rows = rows.new_empty(rows.shape).copy_(rows)
    found: torch.Tensor = torch._grouped_mm(rows, w, offs=ends)
    return found


def _ends(call: Call, experts: int, height: int) -> torch.Tensor:
    """Return where the rows of each of this rank's experts end, [E/W] int32, from a routing's words
    (kernels/moe/tables.cuh): the ids of all places come first, the number of rows, which is 0 if the
    dispatch was refused, is the fourth from the end."""
    words, plan = call.tensors["routing"], call.plan
    shape = plan.shape
    assert isinstance(shape, MoeShape | GemmCombineShape)
    local = words[: plan.world_size * shape.tokens * shape.top_k] - call.rank * experts
    elsewhere = (local < 0) | (local >= experts)
    counts = words.new_zeros(experts + 1)
    counts.index_add_(0, local.masked_fill(elsewhere, experts), torch.ones_like(local))
    ends = counts[:experts].cumsum(0, dtype=torch.int32).minimum(words[-4])
    ends[-1:].fill_(height)  # an assignment would copy it from the host, which no graph can
    return ends


def _expect_no_graph(plan: LaunchPlan) -> None:
    """Raise Unsupported where a graph is captured and torch's product would wait for the device."""
    if not torch.cuda.is_current_stream_capturing():
        return
    capability = torch.cuda.get_device_capability()
    if plan.dtype != "bfloat16" or capability not in _IN_GRAPHS:
        raise Unsupported(
            f"accelerator {plan.accelerator!r} cannot capture {plan.op} of {plan.dtype} on compute "
            f"capability {'.'.join(map(str, capability))}: torch's product of groups waits there; call "
            "it outside of the graph, or use bfloat16 on 9.0 or 10.0"
        )
