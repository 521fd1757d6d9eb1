"""A cache that keeps the shapes of a world's last calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST = 1024
"""The number of shapes that are kept for certain; up to twice as many are."""


class TwoGenerationCache(dict[K, V | None]):
    """A map that keeps the values of the keys used last: at least those of the last ``most``
    different keys, at most those of twice as many. A key that is not kept has the value None.

    There are two generations: a used key moves to the younger one. When that is full, the older one
    is dropped and the younger becomes the older. So what is kept is found as fast as in a dict, and
    what goes depends on the order of uses alone, which is the same on every rank. Until the
    generations move on, a use of a key changes nothing; ``forgets`` is called when they do.
    """

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self.most = most
        self.forgets: Callable[[], None] = lambda: None
        self._before: dict[K, V | None] = {}

    def __missing__(self, key: K) -> V | None:
        found = self._before.pop(key, None)
        if found is not None:
            self[key] = found
        return found

    def __setitem__(self, key: K, value: V | None) -> None:
        if len(self) >= self.most and key not in self:
            self._before = dict(self)
            self.clear()
            self.forgets()
        dict.__setitem__(self, key, value)

    def peek(self, key: K) -> V | None:
        """Return the value of a key, which is not used thereby."""
        return self.get(key) or self._before.get(key)

    def kept(self) -> int:
        """Return the number of values that are kept."""
        return len(self) + len(self._before)
