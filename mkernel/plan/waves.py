"""When a device's tiles are computed, some of which wait for data: whole tiles, wave by wave."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator


def ends_us(
    steps: Iterable[tuple[float, float]], *, tiles: int, tile_us: float, cores: int
) -> Iterator[float]:
    """When each step's tiles are done. A persistent kernel: tile t runs on core t mod ``cores``, after
    that core's tile before it.

    Args:
        steps: (share of all tiles, microsecond from which on its data is there), in order; the shares
            add up to 1. A tile that two steps share belongs to the later one.
        tiles, tile_us: of the device in all, and the time of one.
    """
    free: deque[tuple[float, int]] = deque([(0.0, cores)])  # cores in turn, and from when on
    share = ready_us = end_us = 0.0
    given = 0
    for part, there_us in steps:
        share += part
        ready_us = max(ready_us, there_us)
        upto = tiles if share > 1 - 1e-9 else int(share * tiles + 1e-9)
        left, given = upto - given, upto
        while left:
            from_us, count = free.popleft()
            took = min(count, left)
            left -= took
            if took < count:
                free.appendleft((from_us, count - took))
            done_us = max(from_us, ready_us) + tile_us
            end_us = max(end_us, done_us)
            if free and free[-1][0] == done_us:
                took += free.pop()[1]
            free.append((done_us, took))
        yield end_us
