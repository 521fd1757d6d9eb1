"""MoE dispatch, with a product and without, and its combine. A call keeps its routing in an int32
tensor of tables (``kernels/moe/routing.hpp``), of which the combine gets those of the routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from mkernel.backends.accelerators.ascend.op import TORCH_DTYPES, Blocks, Prepared, dense, native
from mkernel.backends.accelerators.ascend.schedule import (
    CombineSchedule,
    DispatchSchedule,
    check_steps,
)
from mkernel.backends.contracts.accelerator import Call
from mkernel.errors import CapacityExceeded
from mkernel.plan.model import CombineShape, DispatchShape, LaunchPlan, MoeShape
from mkernel.plan.pipeline import Tiling
from mkernel.plan.standard import tiling

if TYPE_CHECKING:
    from mkernel.backends.accelerators.ascend import _ascend


def balanced_ids(plan: LaunchPlan) -> torch.Tensor:
    """Return a routing [W, T, k] int32 that gives every expert equally many rows, within one token,
    and sends each token's slots to experts that are far apart. A record uses it if it is given no
    other."""
    shape = _shape(plan)
    token = torch.arange(plan.world_size * shape.tokens, device="cpu").view(
        plan.world_size, shape.tokens, 1
    )
    slots = torch.arange(shape.top_k, device="cpu") * (shape.experts // shape.top_k)
    return ((token + slots) % shape.experts).to(torch.int32)


def table_words(world: int, tokens: int, top_k: int, experts: int) -> int:
    """Return the words of the tables that a combine reads (``Routing::words`` of
    ``kernels/moe/routing.hpp``)."""
    begin, start = world * (tokens + 1), world
    return experts // world + 1 + begin + start + (world + 1) * tokens * top_k + 1


class MoeDispatchOp:
    """The op ``moe_dispatch_gemm``. Its outputs are the first rows, as many as the routing gives,
    of a tensor for the largest possible number."""

    def geometry(self, plan: LaunchPlan) -> _ascend.MoeDispatchGeometry:
        """Return the kernels' geometry. ValueError for rows or tiles that the on-chip buffers
        cannot hold, and for steps that invariant results do not have."""
        shape = plan.shape
        assert isinstance(shape, MoeShape)
        how = plan.part(DispatchSchedule)
        check_steps(plan, how.tiling)
        return _dispatch_geometry(plan, shape.hidden, how.rows_per_chunk, how.tiling)

    def blocks(self, plan: LaunchPlan) -> Blocks:
        """Return the cores: cube cores multiply; vector cores send, build tables and spread tokens."""
        how = plan.part(DispatchSchedule)
        return Blocks(comm=how.comm_cores, cube=how.cube_cores, vector=how.vector_cores)

    def prepare(self, call: Call) -> Prepared:
        """Build the kernels of a call, which returns ``outputs`` [R, I] and ``counts`` [E/W] int64
        and fills ``routing`` for the combine."""
        plan, geometry = call.plan, self.geometry(call.plan)
        shape = plan.shape
        assert isinstance(shape, MoeShape)
        experts = shape.experts // plan.world_size
        by_rows = plan.b_layout == "row"
        x, ids, w = (call.tensors[name] for name in ("x", "topk_ids", "w"))
        dense("x", x, (shape.tokens, shape.hidden), plan.dtype)
        dense("topk_ids", ids, (shape.tokens, shape.top_k), "int32", "int64")
        stored = w if by_rows else w.transpose(1, 2)
        inner = (shape.hidden, shape.features) if by_rows else (shape.features, shape.hidden)
        dense("w", stored, (experts, *inner), plan.dtype)
        rows = geometry.most_rows
        grouped = torch.empty((rows, shape.hidden), dtype=x.dtype, device="cpu")
        outputs = torch.empty(
            (rows, shape.features), dtype=TORCH_DTYPES[plan.out_dtype], device="cpu"
        )
        tables = torch.empty(geometry.table_words, dtype=torch.int32, device="cpu")
        kernels = native().moe_dispatch(
            geometry=geometry,
            x=x.data_ptr(),
            topk_ids=(ids.data_ptr(), ids.element_size() // 4),
            w=(w.data_ptr(), inner[1], 1) if by_rows else (w.data_ptr(), 1, inner[1]),
            grouped=grouped.data_ptr(),
            out=outputs.data_ptr(),
            out_dtype=plan.out_dtype,
            tables=tables.data_ptr(),
            routing=0,
            order=list(plan.order("node")[call.rank]),
        )

        def finish(_: torch.Tensor = grouped) -> Mapping[str, Any]:
            found, counts = _finished(call, tables, outputs)
            return {"outputs": found, "counts": counts}

        return Prepared(kernels, finish)

    def record(self, plan: LaunchPlan, rank: int, ids: torch.Tensor | None = None) -> Prepared:
        """Build the kernels without tensors. The schedule depends on the routing ``ids`` [W, T, k]
        int32 of all ranks; default: :func:`balanced_ids`. Recording writes the tables, which
        ``finish`` returns as ``routing``."""
        given = (balanced_ids(plan) if ids is None else ids).contiguous()
        return _recorded(plan, rank, self.geometry(plan), given)


class MoeRowsOp(MoeDispatchOp):
    """The op ``moe_dispatch``, whose rows are those that a dispatch would multiply: it has no features,
    so no cube core works."""

    def geometry(self, plan: LaunchPlan) -> _ascend.MoeDispatchGeometry:
        """Return the kernels' geometry. ValueError for rows that the on-chip buffers cannot hold."""
        shape, how = plan.shape, plan.part(CombineSchedule)
        assert isinstance(shape, DispatchShape)
        return _dispatch_geometry(plan, shape.hidden, how.rows_per_chunk, tiling(plan.dtype))

    def blocks(self, plan: LaunchPlan) -> Blocks:
        """Return the cores: vector cores send, build tables and spread tokens."""
        how = plan.part(CombineSchedule)
        return Blocks(comm=how.comm_cores, cube=0, vector=how.vector_cores)

    def prepare(self, call: Call) -> Prepared:
        """Build the kernels of a call, which returns ``rows`` [R, H] and ``counts`` [E/W] int64 and
        fills ``routing`` for the combine."""
        plan, geometry, shape = call.plan, self.geometry(call.plan), _shape(call.plan)
        x, ids = (call.tensors[name] for name in ("x", "topk_ids"))
        dense("x", x, (shape.tokens, geometry.hidden), plan.dtype)
        dense("topk_ids", ids, (shape.tokens, shape.top_k), "int32", "int64")
        grouped = torch.empty((geometry.most_rows, geometry.hidden), dtype=x.dtype, device="cpu")
        tables = torch.empty(geometry.table_words, dtype=torch.int32, device="cpu")
        kernels = native().moe_dispatch(
            geometry=geometry,
            x=x.data_ptr(),
            topk_ids=(ids.data_ptr(), ids.element_size() // 4),
            w=(0, 0, 1),
            grouped=grouped.data_ptr(),
            out=0,
            out_dtype=plan.out_dtype,
            tables=tables.data_ptr(),
            routing=0,
            order=list(plan.order("node")[call.rank]),
        )

        def finish() -> Mapping[str, Any]:
            rows, counts = _finished(call, tables, grouped)
            return {"rows": rows, "counts": counts}

        return Prepared(kernels, finish)


def _finished(
    call: Call, tables: torch.Tensor, results: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill a dispatch's ``routing`` from its tables; return the first of ``results``, as many as the
    routing or the capacity gives, and counts. CapacityExceeded."""
    shape, routing = call.plan.shape, call.tensors["routing"]
    assert isinstance(shape, MoeShape | DispatchShape)
    world = call.plan.world_size
    kept = table_words(world, shape.tokens, shape.top_k, shape.experts)
    base = tables[: shape.experts // world + 1].to(torch.int64)
    rows = int(base[-1])
    height = rows if shape.capacity is None else shape.capacity
    if rows > height:
        raise CapacityExceeded(call.rank, rows, height)
    routing[:kept] = tables[:kept]
    routing[kept] = height
    found = results[:rows] if height == rows else results.new_zeros(height, results.shape[1])
    if height > rows:
        found[:rows] = results[:rows]
    return found, base.diff()


class MoeCombineOp:
    """The op ``moe_combine``. It multiplies nothing: its compute kernel has only vector cores."""

    def geometry(self, plan: LaunchPlan) -> _ascend.MoeCombineGeometry:
        """Return the kernels' geometry. ValueError for rows that the on-chip buffers cannot hold."""
        made: _ascend.MoeCombineGeometry = native().MoeCombineGeometry(
            **_cut(plan, plan.part(CombineSchedule).rows_per_chunk), out_dtype=plan.out_dtype
        )
        return made

    def blocks(self, plan: LaunchPlan) -> Blocks:
        """Return the cores: vector cores send, and add up what arrived."""
        how = plan.part(CombineSchedule)
        return Blocks(comm=how.comm_cores, cube=0, vector=how.vector_cores)

    def prepare(self, call: Call) -> Prepared:
        """Build the kernels of a call, which fills ``out``."""
        plan = call.plan
        shape, tables = _shape(plan), call.tensors["routing"]
        y, weights, out = (call.tensors[name] for name in ("y", "topk_weights", "out"))
        assert isinstance(shape, CombineShape)
        rows = int(tables[shape.experts // plan.world_size])
        dense("y", y[:rows], (rows, shape.features), plan.dtype)
        words = table_words(plan.world_size, shape.tokens, shape.top_k, shape.experts)
        places = shape.tokens * shape.top_k
        homes = int(tables[words - 1])
        if homes < places:  # a place without an expert adds a row of zeros, whatever its weight
            y = torch.cat([y[:rows], y.new_zeros(1, shape.features)])
            rows += 1
            without = tables[words - 1 - places : words - 1] >= homes
            weights = weights.masked_fill(without.view(weights.shape), 0)
        addresses = (
            dense("y", y[:rows], (rows, shape.features), plan.dtype),
            dense("topk_weights", weights, (shape.tokens, shape.top_k), "float32"),
            dense("out", out, (shape.tokens, shape.features), plan.out_dtype),
        )
        kernels = self._kernels(plan, call.rank, tables, rows, addresses)

        def finish(_: tuple[torch.Tensor, ...] = (tables, y, weights)) -> Mapping[str, Any]:
            return {}

        return Prepared(kernels, finish)

    def record(self, plan: LaunchPlan, rank: int, ids: torch.Tensor | None = None) -> Prepared:
        """Build the kernels with the tables that a dispatch of this routing leaves
        (:meth:`MoeDispatchOp.record`)."""
        given = (balanced_ids(plan) if ids is None else ids).contiguous()
        rows_per_chunk = plan.part(CombineSchedule).rows_per_chunk
        geometry = _dispatch_geometry(plan, _LEAST_HIDDEN, rows_per_chunk, tiling(plan.dtype))
        sent = _recorded(plan, rank, geometry, given)
        native().record(
            kernels=sent.kernels,
            rank=rank,
            same_node=[True] * plan.world_size,
            blocks=Blocks(comm=1, cube=1, vector=1),
            node=0,
        )
        assert sent.finish is not None
        tables = sent.finish()["routing"]
        rows = int(tables[_shape(plan).experts // plan.world_size])
        return Prepared(
            self._kernels(plan, rank, tables, rows, (0, 0, 0)), lambda: {"routing": tables}
        )

    def _kernels(
        self,
        plan: LaunchPlan,
        rank: int,
        tables: torch.Tensor,
        rows: int,
        addresses: tuple[int, int, int],
    ) -> _ascend.Kernels:
        y, weights, out = addresses
        kernels: _ascend.Kernels = native().moe_combine(
            geometry=self.geometry(plan),
            y=y,
            rows=rows,
            weights=weights,
            tables=tables.data_ptr(),
            out=out,
            order=list(plan.order("node").consumers(rank)),
        )
        return kernels


_LEAST_HIDDEN = 16
"""The width of tokens in a dispatch that is recorded only for its tables."""


def _shape(plan: LaunchPlan) -> MoeShape | DispatchShape | CombineShape:
    assert isinstance(plan.shape, MoeShape | DispatchShape | CombineShape)
    return plan.shape


def _cut(plan: LaunchPlan, rows_per_chunk: int) -> dict[str, Any]:
    """Return the arguments that both geometries share."""
    shape = _shape(plan)
    return {
        "world": plan.world_size,
        "tokens": shape.tokens,
        "top_k": shape.top_k,
        "experts": shape.experts // plan.world_size,
        "features": 0 if isinstance(shape, DispatchShape) else shape.features,
        "rows_per_chunk": rows_per_chunk,
        "far": plan.nodes > 1,
        "dtype": plan.dtype,
    }


def _dispatch_geometry(
    plan: LaunchPlan, hidden: int, rows_per_chunk: int, tiles: Tiling
) -> _ascend.MoeDispatchGeometry:
    made: _ascend.MoeDispatchGeometry = native().MoeDispatchGeometry(
        **_cut(plan, rows_per_chunk), hidden=hidden, **dict(tiles)
    )
    return made


def _recorded(
    plan: LaunchPlan, rank: int, geometry: _ascend.MoeDispatchGeometry, ids: torch.Tensor
) -> Prepared:
    """Return kernels in which only ids and tables are real."""
    tables = torch.empty(geometry.table_words, dtype=torch.int32, device="cpu")
    own = ids[rank]
    kernels = native().moe_dispatch(
        geometry=geometry,
        x=0,
        topk_ids=(own.data_ptr(), 1),
        w=(0, geometry.features, 1) if plan.b_layout == "row" else (0, 1, geometry.hidden),
        grouped=0,
        out=0,
        out_dtype=plan.out_dtype,
        tables=tables.data_ptr(),
        routing=ids.data_ptr(),
        order=list(plan.order("node")[rank]),
    )

    def finish(_: torch.Tensor = ids) -> Mapping[str, Any]:
        return {"routing": tables}

    return Prepared(kernels, finish)
