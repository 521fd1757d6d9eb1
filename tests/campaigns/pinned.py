"""Turns that every campaign plays again: those that found defects, others of the kinds that did, and
one of each fault of a device on each NIC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from campaigns.draw import Turn, draw

_FILE = Path(__file__).parent / "pinned.json"


class Pinned(NamedTuple):
    """One of them. ``drawn``: the turn in words when it was pinned. ``found``: what it, or one like it,
    once showed."""

    seed: int
    number: int
    kind: str | None
    drawn: str
    found: str

    def turn(self) -> Turn:
        """Return the turn. ValueError: the seed draws another one by now; pin one like it."""
        turn = draw(self.seed, self.number, self.kind)
        if str(turn) != self.drawn:
            raise ValueError(f"{_FILE.name}: {self.drawn!r} is drawn as {str(turn)!r} now")
        return turn


def pinned() -> Iterator[Pinned]:
    """Yield all pinned turns, in the file's order."""
    for each in json.loads(_FILE.read_text()):
        yield Pinned(**each)
