"""The pieces in which ring attention takes long sequences: their order, and their places in memory.

Rows of a rank are cut: all of them, or, if attention is causal, each half, which is one piece of
the zigzag. The queries of a cut see a cut of a peer's keys wholly or not at all. They see these one
after another, followed by the next queries, so that only one cut's results are kept at a time; in
return, a peer sends its keys once for every cut of queries.

Slots. The data area of a rank's workspace has as many slots for each peer as the schedule states,
those of the rank before this one first. The n-th piece of a peer lies in slot n modulo that number,
K and then V, packed. It has arrived when its flag is set; the slot may be written again when its
reader has set another flag at the owner. Each piece of a call has two flags of its own, which hold
the call's epoch.

There is no deadlock: pieces are sent in the order in which readers come to them, counted over all
peers. A piece waits until earlier ones are read, and these wait only until they are sent, which
they are, by induction over the pieces before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mkernel.plan.model import DTYPE_BYTES, AttentionShape


class Cut(NamedTuple):
    """Rows of a rank. ``half``: the half of the zigzag that they belong to, or 0."""

    first: int
    rows: int
    half: int

    @property
    def all(self) -> slice:
        """The slice of these rows."""
        return slice(self.first, self.first + self.rows)


class Step(NamedTuple):
    """A piece of a peer's keys, as one cut of queries sees it. ``number``: its number among the
    pieces of this source that the reader takes; ``turn``: its number among all that it takes."""

    queries: int
    source: int
    keys: Cut
    number: int
    turn: int


def cuts(shape: AttentionShape, world: int, piece_rows: int) -> tuple[Cut, ...]:
    """Cut every rank's rows, ``piece_rows`` each and fewer at the end."""
    rows = shape.sequence // world
    length = rows // 2 if shape.causal else rows
    return tuple(
        Cut(first, min(piece_rows, start + length - first), half)
        for half, start in enumerate(range(0, rows, length))
        for first in range(start, start + length, piece_rows)
    )


def flags(shape: AttentionShape, world: int, piece_rows: int) -> int:
    """Return the number of flags that a call may use."""
    return 2 * world * len(cuts(shape, world, piece_rows)) ** 2


class Pieces:
    """The pieces that ranks read in a plan's calls.

    Attributes:
        cuts: cuts of every rank's rows. slots: number of slots for each peer.
    """

    def __init__(self, shape: AttentionShape, world: int, piece_rows: int, slots: int) -> None:
        self._shape, self._world, self.slots = shape, world, slots
        self.cuts = cuts(shape, world, piece_rows)
        self._most = len(self.cuts) ** 2  # pieces that a reader takes of one source
        self._slot_bytes = 2 * self.bytes(max(each.rows for each in self.cuts))

    def bytes(self, rows: int) -> int:
        """Return the bytes of K, or V, for ``rows`` positions, in any dtype of 2 bytes."""
        shape = self._shape
        return shape.batch * shape.kv_heads * rows * shape.head_dim * DTYPE_BYTES["bfloat16"]

    @property
    def area(self) -> int:
        """The bytes of all slots."""
        return (self._world - 1) * self.slots * self._slot_bytes

    def steps(self, reader: int) -> Iterator[Step]:
        """Yield the pieces that a rank reads from its peers, in its order."""
        taken, turn = [0] * self._world, 0
        for queries, at in enumerate(self.cuts):
            for step in range(1, self._world):
                source = (reader - step) % self._world
                for keys in self.cuts:
                    if self._sees(reader, at, source, keys):
                        yield Step(queries, source, keys, taken[source], turn)
                        taken[source] += 1
                        turn += 1

    def _sees(self, reader: int, queries: Cut, source: int, keys: Cut) -> bool:
        if not self._shape.causal:
            return True
        return self._piece(source, keys.half) < self._piece(reader, queries.half)

    def _piece(self, rank: int, half: int) -> int:
        """Return the piece of the zigzag that ``rank`` holds as its first or second half."""
        return 2 * self._world - 1 - rank if half else rank

    def sent(self, source: int) -> list[tuple[int, Step]]:
        """Return the pieces that a rank sends, in order, as (reader, step)."""
        found = [
            (reader, step)
            for reader in range(self._world)
            if reader != source
            for step in self.steps(reader)
            if step.source == source
        ]
        return sorted(found, key=lambda each: (each[1].turn, each[0]))

    def place(self, reader: int, step: Step) -> int:
        """Return the byte offset of a piece in its reader's data area."""
        before = (reader - step.source) % self._world - 1
        return (before * self.slots + step.number % self.slots) * self._slot_bytes

    def arrived(self, step: Step) -> int:
        """Return the reader's flag that a piece has arrived, which the source sets."""
        return 2 * self._most * step.source + step.number

    def read(self, reader: int, number: int) -> int:
        """Return the source's flag that its piece of this number has been read, which the reader
        sets."""
        return 2 * self._most * reader + self._most + number
