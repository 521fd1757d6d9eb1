"""The kernel for few rows: cuts a product and predicts how long drawing weights takes. It is one
decision, which the schedule follows and the prediction knows.

A tile is ``COLUMNS`` columns; the blocks of a cluster share one, each with its part of K. A cluster
that has several tiles exchanges the sums of one before it draws weights of the next, since sums lie
where the weights were: what an exchange takes is then paid again for each further wave of tiles. So
K is cut into parts that keep all cores busy in one wave where that is possible, and into fewer
where more parts would want a second wave.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mkernel.topology.cost import FewRowsConstants, transfer_us

COLUMNS = 128
DEPTH_BYTES = 128
"""The columns of a tile, and the bytes of K in a step of it; as in hopper/kernels/gemm/few_rows.cuh."""
MOST_SPLITS = 8
"""The most parts of K: blocks of a cluster."""
PARTS = 8
"""The most parts (GPCs) of a device: a cluster is within one, and each has an even number of
cores."""


class Cut(NamedTuple):
    """Clusters of ``splits`` blocks each take tiles in ``waves``, one after another."""

    splits: int
    clusters: int
    waves: int
    weights_us: float
    """The time until the last weights have come, in all waves."""

    def total_us(self, few: FewRowsConstants) -> float:
        """Return the time of the weights and of the exchanges between waves."""
        return self.weights_us + (self.waves - 1) * few.wave_us


@lru_cache(maxsize=256)
def cut(n: int, k: int, itemsize: int, cores: int, few: FewRowsConstants) -> Cut:
    """Return the fastest cut for weights [k, n] of ``itemsize`` bytes an element on ``cores``
    cores; of several that are as fast, the one of fewest parts. Weights come no faster than memory
    delivers them, and no faster than the block with most steps draws its own."""
    tiles, steps = _up(n, COLUMNS), _up(k * itemsize, DEPTH_BYTES)

    def cut_into(splits: int) -> Cut:
        clusters = places(cores, splits)
        waves = _up(tiles, clusters)
        drawn = waves * _up(steps, splits) * COLUMNS * DEPTH_BYTES
        weights = transfer_us(n * k * itemsize, few.weights_gbs, 0.0)
        return Cut(splits, clusters, waves, max(weights, transfer_us(drawn, few.block_gbs, 0.0)))

    legal = range(1, min(MOST_SPLITS, steps, cores) + 1)
    return min(map(cut_into, legal), key=lambda each: each.total_us(few))


def places(cores: int, blocks: int) -> int:
    """Return the number of clusters of so many blocks that fit at once on any such device. Devices
    differ in which of their parts have fewer cores."""
    unused = 2 * ((blocks - 1) // 2)
    return max(1, (cores - PARTS * unused) // blocks)


def _up(value: int, by: int) -> int:
    return -(-value // by)
