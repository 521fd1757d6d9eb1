"""The grouped products of the MoE ops on one rank: the queueing of a plan's calls.

Data flow of a dispatch+GEMM: as that of a dispatch
(:mod:`mkernel.backends.accelerators.cuda.moe.executors`), but
  rows of x and of the workspace, w ──grouped product──▶ outputs; of many tokens it first copies its
      rows into memory of their own, one below the other
Results of a GEMM+combine return by slot straight from the grouped product, or by rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.moe.executors import (
    CombineBase,
    DispatchBase,
    MoeExecutor,
    address_of,
    dtype_of,
    returns_workspace,
)
from mkernel.backends.accelerators.cuda.moe.tuning import MOST_ROW_BYTES, most_tiles
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.operands import deliver, writable
from mkernel.backends.accelerators.hopper.schedule import DispatchSchedule, GemmCombineSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import Workspace, aligned
from mkernel.errors import ArgumentError, Unsupported
from mkernel.plan.model import BLOCK, DTYPE_BYTES, E4M3, GemmCombineShape, LaunchPlan, MoeShape

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


class _Multiplies(MoeExecutor):
    """Base of the executors with a grouped product."""

    def __init__(self, call: Call, context: DispatchContext) -> None:
        """Prepare the plan's calls, as :class:`MoeExecutor` does."""
        super().__init__(call, context)
        if call.plan.nodes > 1:
            native().load_grouped(context.device)

    def _product(
        self,
        call: Call,
        a: torch.Tensor,
        w: torch.Tensor,
        blocks: int,
        *,
        b_scale: torch.Tensor | None,
        a_scale: torch.Tensor | None = None,
        out_scale: torch.Tensor | None = None,
        permuted: torch.Tensor | None = None,
        height: int = 0,
        pieces: int = 0,
        gated: bool = False,
        **how: Any,
    ) -> _kernels.GroupedProduct:
        depth, width = w.shape[1:]
        if a.nbytes >= MOST_ROW_BYTES:
            raise ArgumentError("rows", tuple(a.shape), f"fewer than {MOST_ROW_BYTES >> 30} GiB")
        if b_scale is not None and not how["deep"]:
            raise Unsupported(
                f"wide tiles of {self._plan.op} with e4m3 weights: there are deep ones"
            )
        made: _kernels.GroupedProduct = native().GroupedProduct(
            sizes=self._sizes,
            routing=call.tensors["routing"].data_ptr(),
            a=a.data_ptr(),
            permuted=address_of(permuted),
            b=w.data_ptr(),
            a_scales=address_of(a_scale),
            b_scales=address_of(b_scale),
            out_scales=address_of(out_scale),
            row_bytes=a.shape[1] * a.element_size(),
            n=width // 2 if gated else width,
            k=depth,
            height=height,
            pieces=pieces,
            gated=gated,
            half=self._plan.out_dtype == "float16",
            n_major=self._plan.b_layout == "row",
            waits=self._exchanges(call),
            blocks=blocks,
            **how,
        )
        return made


class DispatchExecutor(_Multiplies, DispatchBase):
    """The executor of one plan's MoE dispatch+GEMM calls in a world, into ``routing`` and tensors
    of its own; or with the ``routing`` of an earlier dispatch."""

    def start(self, call: Call, stream: int) -> Mapping[str, Any]:
        """Queue one call on a stream; the host waits for the number of rows if neither a capacity nor
        an earlier dispatch of this process gives it."""
        made, context, plan = native(), self._context, self._plan
        shape, how = plan.shape, plan.part(DispatchSchedule)
        assert isinstance(shape, MoeShape)
        ids, height = self._own_ids(call)
        x, w = self._rows(call, "x", stream), aligned(call.tensors["w"])
        forked = self._send(call, x, ids, how.push_blocks, stream)
        found: dict[str, torch.Tensor] = {}
        try:
            if not shape.routed:
                found["counts"], height = self._route(
                    call, ids, stream, how.early_tiles, how.early_rows
                )
            elif how.permutes:
                self._permute_again(call.tensors["routing"])
            assert height is not None
            outputs = x.new_empty((height, shape.features), dtype=dtype_of(plan.out_dtype))
            found["outputs"] = outputs
            if plan.out_dtype == E4M3:
                sizes = height, shape.features // BLOCK
                found["scales"] = x.new_empty(sizes, dtype=torch.float32)
            permuted = x.new_empty((height, x.shape[1])) if how.permutes else None
            if forked and self._waits_for_push() and not how.early_tiles:
                forked = False
                context.order.join(stream)
            product = self._product(
                call, x, w, how.blocks, b_scale=call.tensors.get("w_scale"),
                out_scale=found.get("scales"), permuted=permuted, out=outputs.data_ptr(),
                rows=height, height=shape.capacity or 0, pieces=self._pieces(call), tokens=True,
                gated=shape.activation is not None, deep=how.tiling == "deep", wide=False,
                home=False, ends=True,
            )  # fmt: skip
            made.moe_grouped(context.device, self._of_call(call), product, stream)
        finally:
            if forked:
                context.order.join(stream)
        return found

    def _permute_again(self, words: torch.Tensor) -> None:
        """Queue the reset of what a routing counts of permuted rows (kernels/moe/tables.cuh), which its
        own dispatch did. To autograd the words stay the same; inference mode may have made them."""
        shape = self._plan.shape
        assert isinstance(shape, MoeShape)
        counts = 2 * most_tiles(shape, self._plan.world_size)
        with torch.inference_mode():
            words.data[-5 - counts : -4].zero_()  # and how many groups were claimed, behind them


class GemmCombineExecutor(_Multiplies, CombineBase):
    """The executor of one plan's MoE GEMM+combine calls in a world, into ``out``."""

    @staticmethod
    def workspace(plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory that GEMM+combine needs. Unsupported."""
        shape, how = plan.shape, plan.part(GemmCombineSchedule)
        assert isinstance(shape, GemmCombineShape)
        row_bytes = shape.hidden * DTYPE_BYTES[shape.partial_dtype]
        by_rank = how.returns == "ranks"
        return returns_workspace(plan, row_bytes, by_rank=by_rank)

    def start(self, call: Call, stream: int) -> None:
        """Queue one call on a stream."""
        made, device, world, plan = native(), self._context.device, self._of_call(call), self._plan
        shape, how = plan.shape, plan.part(GemmCombineSchedule)
        assert isinstance(shape, GemmCombineShape)
        wide, deep = shape.partial_dtype != plan.out_dtype, how.tiling == "deep"
        h_scale = call.tensors.get("h_scale")
        # Rows that are e4m3 already lie as the product reads them.
        h = self._rows(call, "h", stream) if h_scale is None else aligned(call.tensors["h"])
        w2 = aligned(call.tensors["w2"])
        product = partial(
            self._product, call, h, w2, how.blocks, a_scale=h_scale,
            b_scale=call.tensors.get("w2_scale"), rows=len(h), tokens=False, deep=deep, wide=wide,
        )  # fmt: skip
        if how.returns == "ranks":

            def results() -> torch.Tensor:
                y = h.new_empty((len(h), shape.hidden), dtype=dtype_of(shape.partial_dtype))
                to_y = product(out=y.data_ptr(), home=False, ends=False)
                made.moe_grouped(device, world, to_y, stream)
                return y

            each = shape.hidden * DTYPE_BYTES[shape.partial_dtype]
            self._by_rank(call, stream, each, results, how.sum_blocks, wide=wide)
            return
        out = call.tensors["out"]
        written = writable(out)
        made.moe_grouped(device, world, product(out=0, home=True, ends=True), stream)
        home = self._home(call, None, written, how.sum_blocks, wide=wide, by_rank=False)
        made.moe_home(device, world, home, made.HomeStep.sum_slots, stream)
        deliver(written, out)
