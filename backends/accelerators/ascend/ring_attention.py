"""Ring attention on simulated cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mkernel.backends.accelerators.ascend.op import Blocks, Prepared, dense, native
from mkernel.backends.accelerators.ascend.predict import VECTORS_PER_CUBE
from mkernel.backends.accelerators.ascend.schedule import AttentionSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.errors import ShapeError
from mkernel.plan.model import AttentionShape, LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.ascend import _ascend


class RingAttentionOp:
    """The op ``ring_attention``: products on cube cores; each one's softmax on two vector cores
    beside it."""

    def geometry(self, plan: LaunchPlan) -> _ascend.RingAttentionGeometry:
        """Return the kernels' geometry. ShapeError for heads that are too wide for the on-chip
        buffers, and for invariant results of pieces that cut blocks of keys."""
        shape = _shape(plan)
        widest = native().MAX_HEAD_DIM
        if shape.head_dim > widest:
            raise ShapeError("head_dim", shape.head_dim, f"at most {widest} on 'ascend'")
        pieces, block = plan.world_size * (2 if shape.causal else 1), native().ORDERED_KEYS
        promise = plan.invariant is not None
        if promise and pieces > 1 and shape.sequence % (block * pieces):
            legal = (
                f"a multiple of {block * pieces}: {pieces} pieces of whole blocks of {block} keys"
            )
            raise ShapeError(
                "sequence", shape.sequence, f"{legal}, with invariant results on 'ascend'"
            )
        how = plan.part(AttentionSchedule)
        geometry: _ascend.RingAttentionGeometry = native().RingAttentionGeometry(
            world=plan.world_size,
            batch=shape.batch,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            rows=shape.sequence // plan.world_size,
            head_dim=shape.head_dim,
            causal=shape.causal,
            ordered=promise,
            dtype=plan.dtype,
            rows_per_chunk=how.rows_per_chunk,
            cubes=how.cube_cores,
        )
        return geometry

    def blocks(self, plan: LaunchPlan) -> Blocks:
        """Return the cube cores, the vector cores beside them, and those of the comm kernel."""
        how = plan.part(AttentionSchedule)
        cube = how.cube_cores
        return Blocks(comm=how.comm_cores, cube=cube, vector=VECTORS_PER_CUBE * cube)

    def prepare(self, call: Call) -> Prepared:
        """Build the kernels of a call, which fills ``out`` and ``lse``."""
        plan = call.plan
        shape = _shape(plan)
        rows = shape.sequence // plan.world_size
        queries = (shape.batch, shape.heads, rows, shape.head_dim)
        keys = (shape.batch, shape.kv_heads, rows, shape.head_dim)
        shapes = {"q": queries, "k": keys, "v": keys, "out": queries}
        addresses = {
            name: dense(name, call.tensors[name], wanted, plan.dtype)
            for name, wanted in shapes.items()
        }
        addresses["lse"] = dense("lse", call.tensors["lse"], queries[:3], "float32")
        return self._prepared(plan, call.rank, addresses, call.options["scale"])

    def record(self, plan: LaunchPlan, rank: int) -> Prepared:
        """Build the kernels without tensors; the computation does not depend on data."""
        return self._prepared(plan, rank, dict.fromkeys(("q", "k", "v", "out", "lse"), 0), 1.0)

    def _prepared(
        self, plan: LaunchPlan, rank: int, addresses: Mapping[str, int], scale: float
    ) -> Prepared:
        order = list(plan.order("node")[rank])
        return Prepared(
            native().ring_attention(
                geometry=self.geometry(plan), **addresses, scale=scale, order=order
            )
        )


def _shape(plan: LaunchPlan) -> AttentionShape:
    if not isinstance(plan.shape, AttentionShape):
        raise TypeError(f"a plan of {plan.op} has no attention shape")
    return plan.shape
