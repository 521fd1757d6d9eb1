"""The overlap of a call's communication and compute, as the cost model sees it.

A backend's schedule derives from it what its launches do; no launch reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from mkernel.plan.order import ConsumptionOrder
from mkernel.topology.model import Model

Exchange = Literal["direct", "hierarchical"]
"""The exchange between ranks of different nodes: each pair exchanges by itself; or there is one
message a node, between ranks of the same local rank, which their neighbours share over the scale-up
fabric."""

Returns = Literal["slots", "ranks"]
"""The way in which results of experts come home: each by itself, to be weighted and added there in
the order of slots; or those of a token on one rank as one sum, weighted and added on that rank in
this order, to be added at home in the order of ranks."""


class GemmTile(Model):
    """The output tile of a backend's GEMM kernels, ``rows`` x ``columns``. Along K it is made in pieces
    of ``depth_bytes`` of the inputs, by matrix instructions of ``step_bytes`` each."""

    rows: int = Field(128, ge=1)
    columns: int = Field(256, ge=1)
    depth_bytes: int = Field(512, ge=4)
    step_bytes: int = Field(128, ge=4)


USUAL_TILE = GemmTile()


class Tiling(Model):
    """The tiles of a product, in elements: ``tile_m`` x ``tile_n`` of its results, ``tile_k`` of K
    at a time; ``step_k`` is the depth of one matrix instruction step."""

    tile_m: int = Field(ge=1)
    tile_n: int = Field(ge=1)
    tile_k: int = Field(ge=1)
    step_k: int = Field(ge=1)


class Chunking(Tiling):
    """The cut of what a rank communicates: tiles, and chunks of whole tiles.

    AllGather+GEMM: its rows of A, in tiles of ``tile_m`` x ``tile_k``, K fastest. The ops that
    reduce: the output tiles of ``tile_m`` x ``tile_n`` that it owns, N fastest. Tiles are numbered
    row-group by row-group; chunk c holds tiles [c * tiles_per_chunk, (c + 1) * tiles_per_chunk).
    """

    tiles_per_chunk: int = Field(ge=1)
    chunks_per_rank: int = Field(ge=1)


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of a call on one rank: which ranks are consumed when, in which pieces, on how
    many cores.

    Attributes:
        order: order of the ranks whose data is consumed.
        compute_blocks, comm_blocks: cores of each kernel.
        chunking: tiles and chunks of them; None: chunks are rows.
        rows_per_chunk: rows (positions, tokens) of a chunk; None: chunks are tiles.
        one_kernel_per_chunk: each chunk is computed by a kernel of its own, in whole waves; else
            one kernel takes tiles as their data comes.
        grouped: what a rank sends to all others leaves as one message a chunk, with one signal.
        exchange: the exchange between nodes.
        returns: the way home of results of MoE GEMM+combine.
        whole_tokens: all tokens of a dispatch travel to every rank.
    """

    order: ConsumptionOrder
    compute_blocks: int
    comm_blocks: int
    chunking: Chunking | None = None
    rows_per_chunk: int | None = None
    one_kernel_per_chunk: bool = False
    grouped: bool = False
    exchange: Exchange = "direct"
    returns: Returns = "slots"
    whole_tokens: bool = False

    @property
    def blocks_in_turn(self) -> bool:
        """Return whether all communication blocks take all messages in turn, because messages are
        grouped, or there are more destinations than blocks; else every destination has the same
        number of blocks."""
        return self.grouped or self.comm_blocks < self.destinations

    @property
    def destinations(self) -> int:
        """Count the destinations among which communication blocks are shared out: each neighbour,
        and all other nodes as one."""
        return self.order.ranks_per_node - 1 + (self.order.nodes > 1)
