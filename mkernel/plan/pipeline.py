"""The overlap of a call's communication and compute, as the cost model sees it.

A backend's schedule derives from it what its launches do; no launch reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from mkernel.topology.model import Model

Runs = Literal["node", "far", "rail"]


@dataclass(frozen=True)
class ConsumptionOrder:
    """The ranks whose rows each rank consumes, itself first.

    It is a rotation, so that at every step each source is wanted by exactly one rank: rank (n, l)
    takes (n + i mod ``nodes``, l + j mod ``ranks_per_node``) for i and j from 0 upwards. It is a
    sequence of tuples, each made on access.

    ``runs``: whose rows follow one another. ``node``: those of all ranks of a node, the own one
    first, then the next node's. ``far``: the same, the own node's last, so that what leaves through
    NICs is computed early. ``rail``: those of one rank of each node, then of another of each, so
    that what comes over the scale-up fabric and what comes through NICs takes turns.
    """

    nodes: int
    ranks_per_node: int
    runs: Runs = "node"

    def __len__(self) -> int:
        return self.nodes * self.ranks_per_node

    def __getitem__(self, rank: int) -> tuple[int, ...]:
        return self._rotated(rank, 1)

    def consumers(self, rank: int) -> tuple[int, ...]:
        """Return the rank that consumes ``rank``'s rows at each step."""
        return self._rotated(rank, -1)

    def _rotated(self, rank: int, way: int) -> tuple[int, ...]:
        if not 0 <= rank < len(self):
            raise IndexError(f"rank {rank} of a world of {len(self)}")
        nodes, each = self.nodes, self.ranks_per_node
        node, local = divmod(rank, each)
        return tuple(
            (node + way * i) % nodes * each + (local + way * j) % each for i, j in self.steps(nodes)
        )

    def steps(self, nodes: int) -> Iterator[tuple[int, int]]:
        """Yield (distance in nodes, distance in local ranks) in order, (0, 0) first. ``nodes``
        counts nodes, or groups of them whose first is the own node."""
        locals_ = range(self.ranks_per_node)
        if self.runs == "rail":
            return ((i, j) for j in locals_ for i in range(nodes))
        every = ((i, j) for i in range(nodes) for j in locals_)
        return iter(sorted(every, key=_own_node_last)) if self.runs == "far" else every

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return map(self.__getitem__, range(len(self)))


def _own_node_last(step: tuple[int, int]) -> bool:
    i, j = step
    return i == 0 and j > 0


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


@dataclass(slots=True)
class Pipeline:
    """The pipeline of a call on one rank: which ranks are consumed when, in which pieces, on how
    many cores. No code changes one; it is not frozen, since each plan would pay for that.

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
        whole_tokens: all tokens of a dispatch travel to every rank, or sums of all tokens come home.
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
