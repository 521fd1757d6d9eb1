"""The order in which every rank consumes the others' rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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
