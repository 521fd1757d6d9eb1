"""The kernel whose tiles leave by mail: chooses a tile and predicts a call. It is one decision, which
the schedule follows and the prediction knows.

Clusters compute tiles in waves. What is finished in one wave travels during the next, so that only
the last wave's results are waited for, or, where the link takes longer than the products, all that
it has not carried by then.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mkernel.topology.cost import MailedTilesConstants, Tile, transfer_us

LINE = 64
"""Elements of 16 bits in a line of memory."""


class Tiles(NamedTuple):
    """A call by one size of tiles. Times in microseconds.

    Attributes:
        compute: the products of all waves.
        sent: what the link takes for all results.
        exposed: the exchange that follows the last product.
    """

    tile: Tile
    waves: int
    compute: float
    sent: float
    exposed: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed


@lru_cache(maxsize=256)
def tiles(
    m: int,
    n: int,
    k: int,
    nbytes: float,
    cores: int,
    memory_gbs: float,
    constants: MailedTilesConstants,
) -> Tiles:
    """Return the fastest way to compute [m, n] over k elements of 16 bits and to send ``nbytes`` from
    each rank; of ways that are as fast, the first of the constants' tiles."""

    uneven = constants.uneven ** sum(width % LINE != 0 for width in (k, n))

    def by(tile: Tile) -> Tiles:
        count = _up(m, tile.rows) * _up(n, tile.columns)
        waves = _up(count, max(1, cores // tile.cores))
        flops = 2.0 * tile.rows * tile.columns * k
        one = flops / (tile.cores * tile.tflops_per_core * 1e6) + constants.tile_us
        loads = count * 2.0 * k * (tile.rows + tile.columns) * uneven
        compute = max(
            waves * one,
            transfer_us(loads, constants.loads_gbs, 0.0),
            transfer_us(2.0 * k * (n + m), memory_gbs, 0.0),
        )
        sent = transfer_us(nbytes, constants.egress_gbs, 0.0)
        before = compute * (waves - 1) / waves  # while the link carries what is finished
        carried = min(before, sent * (waves - 1) / waves)
        return Tiles(tile, waves, compute, sent, sent - carried + constants.exchange_us)

    return min(map(by, constants.tiles), key=lambda each: each.total)


def _up(value: int, by: int) -> int:
    return -(-value // by)
