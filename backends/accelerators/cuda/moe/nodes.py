"""The part of an MoE call that communicates with ranks of other nodes.

Tokens cross by puts of a NIC in pieces, once to each of these ranks that wants them, or to each node
that does, whose rank in the same place passes them on (kernels/moe/crossing.hpp). Weights go whole to
each of these ranks. One small kernel, which runs before anything waits for them, sets the flags that
ranks of the node set themselves. Results return by rank only: sums for another node's ranks leave
through an outbox, each piece as soon as it is summed; directly, or for the ranks of the own rail alone,
when those of the neighbours have been added (kernels/moe/home.hpp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkernel.backends.accelerators.cuda.moe.tuning import row_bytes, sums_dtype
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.schedule import ReturnSchedule, TokenSchedule
from mkernel.errors import ArgumentError
from mkernel.plan.model import (
    DTYPE_BYTES,
    CombineShape,
    DispatchShape,
    GemmCombineShape,
    LaunchPlan,
    MoeShape,
)

if TYPE_CHECKING:
    import torch

    from mkernel.backends.accelerators.cuda import _kernels


def crossing_of(plan: LaunchPlan) -> TokenSchedule:
    """Return how tokens of a dispatch cross between nodes. ArgumentError for a schedule that calls
    would not follow."""
    how = plan.part(TokenSchedule)
    pieces, blocks = how.pieces, how.land_blocks
    if (plan.nodes == 1) != (pieces == 0):
        legal = "0 in one node" if pieces else "1 or more between nodes"
        raise ArgumentError("plan.schedule.pieces", pieces, legal)
    if (pieces == 0) != (blocks == 0):
        raise ArgumentError("plan.schedule.land_blocks", blocks, f"as there are {pieces} pieces")
    if pieces == 0 and how.exchange != "direct":
        raise ArgumentError("plan.schedule.exchange", how.exchange, "direct in one node")
    _check_kept(how, outbox_bytes(plan))
    return how


def _check_kept(how: TokenSchedule | ReturnSchedule, outbox: int) -> None:
    """Raise ArgumentError for other bytes of relays than those that wait for their puts."""
    kept = outbox if how.exchange == "hierarchical" else 0
    if how.relay_bytes != kept:
        raise ArgumentError("plan.schedule.relay_bytes", how.relay_bytes, f"{kept} here")


def returning_of(plan: LaunchPlan) -> ReturnSchedule:
    """Return how sums for ranks of other nodes travel. ArgumentError for a schedule that calls would
    not follow."""
    how, shape = plan.part(ReturnSchedule), plan.shape
    pieces, relays = how.pieces, how.exchange == "hierarchical"
    assert isinstance(shape, CombineShape | GemmCombineShape)
    rows = -(-shape.tokens // max(pieces, 1))
    if pieces != (0 if plan.nodes == 1 else -(-shape.tokens // rows)):
        legal = (
            "0 in one node" if plan.nodes == 1 else f"pieces of {shape.tokens} tokens, none empty"
        )
        raise ArgumentError("plan.schedule.pieces", pieces, legal)
    if pieces == 0 and relays:
        raise ArgumentError("plan.schedule.exchange", how.exchange, "direct in one node")
    sums = sums_dtype(plan) if relays else None
    if how.node_sums != sums:
        raise ArgumentError("plan.schedule.node_sums", how.node_sums, f"{sums} here")
    _check_kept(how, sums_bytes(plan))
    return how


def sums_bytes(plan: LaunchPlan) -> int:
    """Return the bytes of sums of results that wait for their puts: directly those for every rank, own
    ones included; hierarchically those for each peer of the rail."""
    shape, relays = plan.shape, plan.part(ReturnSchedule).exchange == "hierarchical"
    assert isinstance(shape, CombineShape | GemmCombineShape)
    width = shape.features if isinstance(shape, CombineShape) else shape.hidden
    peers = plan.nodes - 1 if relays else plan.world_size
    return peers * shape.tokens * width * DTYPE_BYTES[sums_dtype(plan)]


def outbox_bytes(plan: LaunchPlan) -> int:
    """Return the bytes of the rows of a dispatch that wait for their puts: the own tokens once for each
    peer that they cross to."""
    shape, how = plan.shape, plan.part(TokenSchedule)
    assert isinstance(shape, MoeShape | DispatchShape)
    peers = plan.nodes - 1
    if how.exchange == "direct":
        peers *= plan.ranks_per_node
    return peers * shape.tokens * row_bytes(shape.hidden, scaled=plan.scales is not None)


class FarRanks:
    """The ranks of other nodes, in the calls of one plan."""

    def __init__(
        self, device: int, sizes: _kernels.MoeSizes, row_bytes: int, how: ReturnSchedule
    ) -> None:
        """Prepare the calls. ``row_bytes``: bytes of a returning sum."""
        self._device, self._sizes, self._row_bytes = device, sizes, row_bytes
        self._pieces, self._relays = how.pieces, how.exchange == "hierarchical"

    def send_weights(self, world: _kernels.DeviceWorld, weights: torch.Tensor, stream: int) -> None:
        """Send the own weights, and land those of others."""
        made, slots = native(), self._sizes.far_weights(self._relays)
        made.send_far(self._device, world, weights.data_ptr(), slots, stream)
        made.land_far(self._device, world, [slots], stream)

    def send_sums(self, world: _kernels.DeviceWorld, piece: int, stream: int) -> None:
        """Send a piece of the contents of the outbox; behind the last one land the sums of others."""
        made = native()
        slots = self._sizes.far_sums(self._row_bytes, self._pieces, self._relays)
        outbox = self._sizes.outbox_offset(self._row_bytes)
        made.send_outbox(self._device, world, outbox, slots, stream, piece=piece)
        if piece == self._pieces - 1:
            made.land_far(self._device, world, [slots], stream)
