"""The published AllGather+GEMM as a schedule for the timed model; described, not run.

Its description states, in our words: a rank's rows of A are cut into tiles of 128 x 256, tiles in
chunks. Communication blocks are dealt out evenly to the other ranks; each sends a contiguous range
of chunks: the tiles, a fence, then the chunk's flag and a counter per source. A compute block takes
whole *row groups* of 128 rows, the own rank's first and without waits, then those of the other
ranks: for each output tile of 128 x 256 it goes along K, waiting for a chunk the first time it
meets it. L1 and L0 are double-buffered, L0C is not.

We assume what it leaves open: row groups go round-robin to blocks in the order of consumption; that
order takes one other rank after the other, the next one first; a busy poll costs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from mkernel.backends.accelerators.ascend.trace import (
    Core,
    Kind,
    Pipe,
    Records,
    Role,
    blob,
    instruction,
    set_flag,
    wait_flag,
)

BASE_M, BASE_N, STEP_K = 128, 256, 64
"""The published tile sizes: rows of a tile; columns of a tile of A and of an output tile; K of one
matrix instruction."""
_ITEMSIZE, _OUT_ITEMSIZE = 2, 4
_MAX_CHUNKS, _CHUNK, _MAX_CHUNK = 128, 4, 64


@dataclass(frozen=True)
class Shape:
    """The product C [m, n] = A [m, k] @ B [k, n], whole on every rank; A is sharded by rows.

    Raises:
        ValueError: a dimension that the published kernels do not take.
    """

    ranks: int
    m: int
    k: int
    n: int

    def __post_init__(self) -> None:
        for name, value, step in (
            ("m", self.m, BASE_M * self.ranks),
            ("k", self.k, BASE_N),
            ("n", self.n, BASE_N),
        ):
            if value < 1 or value % step:
                raise ValueError(
                    f"{name} = {value}: the published kernels take multiples of {step}"
                )

    @property
    def row_groups(self) -> int:
        """The groups of 128 rows that one rank owns."""
        return self.m // self.ranks // BASE_M

    @property
    def k_tiles(self) -> int:
        """The tiles of a row group."""
        return self.k // BASE_N

    @property
    def chunk_tiles(self) -> int:
        """The tiles of a chunk: 4, or the number that gives about 128 chunks per source."""
        tiles = self.row_groups * self.k_tiles
        if tiles <= _CHUNK * _MAX_CHUNKS:
            return _CHUNK
        least = -(-tiles // _MAX_CHUNKS)
        return min(_MAX_CHUNK, -(-least // _CHUNK) * _CHUNK)

    @property
    def chunks(self) -> int:
        """The chunks that one rank sends to each other rank."""
        return -(-self.row_groups * self.k_tiles // self.chunk_tiles)

    def flag(self, source: int, chunk: int) -> int:
        """Return the signal of a chunk, at each receiver."""
        return source * self.chunks + chunk

    def summary(self, source: int) -> int:
        """Return the counter of a source's chunks."""
        return self.ranks * self.chunks + source


def trace(shape: Shape, rank: int, *, compute_blocks: int = 24, comm_blocks: int = 48) -> bytes:
    """Return a rank's trace, for :func:`~mkernel.backends.accelerators.ascend.timeline.model`."""
    comm = [_comm(shape, rank, block, comm_blocks) for block in range(comm_blocks)]
    compute = [_compute(shape, rank, block, compute_blocks) for block in range(compute_blocks)]
    cores: list[Core] = [(Role.COMM, each) for each in comm]
    cores += [(Role.CUBE, each) for each in compute]
    return blob(rank, shape.ranks, cores)


def _joined(parts: list[Records]) -> Records:
    """Concatenate records as bytes: numpy would compare all fields of records, part by part, which
    takes most of a trace's time."""
    kind = instruction(Kind.FENCE).dtype
    whole: Records = np.frombuffer(b"".join(part.tobytes() for part in parts), kind).copy()
    return whole


def _share(items: int, members: int, member: int) -> range:
    """Return a contiguous part of ``range(items)``; parts differ by at most one."""
    bounds = [items * i // members for i in range(members + 1)]
    return range(*list(pairwise(bounds))[member])


def _comm(shape: Shape, rank: int, block: int, blocks: int) -> Records:
    destinations = [(rank + step) % shape.ranks for step in range(1, shape.ranks)]
    parts: list[Records] = []
    if blocks > len(destinations):
        which = block % len(destinations)
        members = -(-(blocks - which) // len(destinations))
        for chunk in _share(shape.chunks, members, block // len(destinations)):
            parts += _send(shape, rank, destinations[which], chunk)
    else:
        for item in range(block, shape.chunks * len(destinations), blocks):
            chunk, which = divmod(item, len(destinations))
            parts += _send(shape, rank, destinations[which], chunk)
    return _joined(parts)


def _send(shape: Shape, rank: int, peer: int, chunk: int) -> list[Records]:
    tiles = min(shape.chunk_tiles, shape.row_groups * shape.k_tiles - chunk * shape.chunk_tiles)
    put = instruction(
        Kind.TPUT, Pipe.MTE3, chunk=chunk, peer=peer, amount=BASE_M * BASE_N * _ITEMSIZE
    )
    puts = np.repeat(put, tiles)
    puts["signal"] = 1 + chunk * shape.chunk_tiles + np.arange(tiles)  # pieces of the own A
    raised = (shape.flag(rank, chunk), shape.summary(rank))
    return [
        puts,
        instruction(Kind.FENCE, chunk=chunk),
        *(instruction(Kind.TNOTIFY, chunk=chunk, signal=s, peer=peer, amount=1) for s in raised),
    ]


def _compute(shape: Shape, rank: int, block: int, blocks: int) -> Records:
    order = [
        ((rank + step) % shape.ranks, group)
        for step in range(shape.ranks)
        for group in range(shape.row_groups)
    ]
    parts = [set_flag(Pipe.MTE1, Pipe.MTE2, event) for event in (0, 1)]
    parts += [set_flag(Pipe.M, Pipe.MTE1, event) for event in (0, 1)]
    parts.append(set_flag(Pipe.FIX, Pipe.M))
    plain = [_output_tile(shape.k_tiles, half, _NO_WAITS) for half in (0, 1)]
    half = 0
    for source, group in order[block::blocks]:
        for n_tile in range(shape.n // BASE_N):
            if source != rank and n_tile == 0:
                waits = _waits(shape, source, group)
                tile = _output_tile(shape.k_tiles, half, waits)
            else:
                tile = plain[half].copy()
            loads = np.flatnonzero(tile["kind"] == Kind.TLOAD)
            if source == rank:
                tile["signal"][loads[0::2]] = 1 + group * shape.k_tiles + np.arange(shape.k_tiles)
            b = 1 + shape.row_groups * shape.k_tiles + n_tile * shape.k_tiles
            tile["signal"][loads[1::2]] = b + np.arange(shape.k_tiles)
            parts.append(tile)
            half = (half + shape.k_tiles) % 2
    return _joined(parts)


_Waits = Mapping[int, Records]
_NO_WAITS: _Waits = {}


def _waits(shape: Shape, source: int, group: int) -> _Waits:
    """Return the wait before each K tile of a row group that is the first of its chunk."""
    found = {}
    seen = None
    for k_tile in range(shape.k_tiles):
        chunk = (group * shape.k_tiles + k_tile) // shape.chunk_tiles
        if chunk != seen:
            signal = shape.flag(source, chunk)
            found[k_tile] = instruction(
                Kind.TWAIT, chunk=chunk, signal=signal, peer=source, amount=1
            )
        seen = chunk
    return found


def _output_tile(k_tiles: int, half: int, waits: _Waits) -> Records:
    """Return the records of an output tile: all of K, starting with this half of L1, then the store
    from L0C."""
    parts = [wait_flag(Pipe.FIX, Pipe.M)]
    for k_tile in range(k_tiles):
        if k_tile in waits:
            parts.append(waits[k_tile])
        parts.append(_k_tile((half + k_tile) % 2, k_tile == 0))
    return _joined(
        [
            *parts,
            set_flag(Pipe.M, Pipe.FIX),
            wait_flag(Pipe.M, Pipe.FIX),
            instruction(Kind.TSTORE, Pipe.FIX, amount=BASE_M * BASE_N * _OUT_ITEMSIZE),
            set_flag(Pipe.FIX, Pipe.M),
        ]
    )


@cache
def _k_tile(half: int, first: bool) -> Records:
    """Return the records that load A [128, 256] and B [256, 256] and multiply them into L0C in
    steps of 64."""
    parts = [
        wait_flag(Pipe.MTE1, Pipe.MTE2, half),
        instruction(Kind.TLOAD, Pipe.MTE2, amount=BASE_M * BASE_N * _ITEMSIZE),
        instruction(Kind.TLOAD, Pipe.MTE2, amount=BASE_N * BASE_N * _ITEMSIZE),
        set_flag(Pipe.MTE2, Pipe.MTE1, half),
        wait_flag(Pipe.MTE2, Pipe.MTE1, half),
    ]
    for step in range(BASE_N // STEP_K):
        kind = Kind.TMATMUL if first and step == 0 else Kind.TMATMUL_ACC
        parts += [
            wait_flag(Pipe.M, Pipe.MTE1, step % 2),
            instruction(Kind.TEXTRACT, Pipe.MTE1, amount=BASE_M * STEP_K * _ITEMSIZE),
            instruction(Kind.TEXTRACT, Pipe.MTE1, amount=STEP_K * BASE_N * _ITEMSIZE),
            set_flag(Pipe.MTE1, Pipe.M, step % 2),
            wait_flag(Pipe.MTE1, Pipe.M, step % 2),
            instruction(kind, Pipe.M, amount=BASE_M * STEP_K * BASE_N, width=_ITEMSIZE),
            set_flag(Pipe.M, Pipe.MTE1, step % 2),
        ]
    return _joined([*parts, set_flag(Pipe.MTE1, Pipe.MTE2, half)])
