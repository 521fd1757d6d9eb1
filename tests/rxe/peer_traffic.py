"""The puts of ``test_pyverbs_peer.py``: what either end sends, and so what the other must find.

Each end puts batch by batch. Batches take turns on two halves of the memory and of the signals, and an
end begins a batch once it has checked the other's previous one: so nothing is overwritten unchecked,
and after each batch every byte and every count is known exactly. Needs the standard library only.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

BATCH = 100
SLOT = 4096
HALF = BATCH * SLOT
INBOX = 2 * HALF
"""Where the other's puts land; the own sources lie before it, in the same order."""
NBYTES = 2 * INBOX
SIGNALS = 24
"""Of each half."""
_SIZES = (0, 1, 7, 64, 65, 200, 513, 1000, 1024, 2047, 4096)
_BLOCK = {sender: hashlib.shake_128(b"end %d" % sender).digest(1 << 17) for sender in range(2)}


class Put(NamedTuple):
    """``offset``: in the sources, and from INBOX on at the other end."""

    offset: int
    payload: bytes
    signal: int
    value: int


def put_of(sender: int, number: int) -> Put:
    """The ``number``-th put of an end. Every 25th adds more than a put without a group can."""
    batch, slot = divmod(number, BATCH)
    half = batch % 2
    start = number * 61 % 65521
    return Put(
        half * HALF + slot * SLOT,
        _BLOCK[sender][start : start + _SIZES[number % len(_SIZES)]],
        half * SIGNALS + slot % SIGNALS,
        256 + number if number % 25 == 0 else 1 + number * 7 % 255,
    )


def batch_of(sender: int, batch: int) -> list[Put]:
    """The puts of a batch, in their order."""
    return [put_of(sender, batch * BATCH + slot) for slot in range(BATCH)]


def add_up(counts: dict[int, int], puts: list[Put]) -> None:
    """Count what these puts add to each signal."""
    for put in puts:
        counts[put.signal] = counts.get(put.signal, 0) + put.value
