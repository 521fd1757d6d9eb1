"""In which order every rank consumes the others' rows."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from mkernel.topology.model import Model


class ConsumptionOrder(Model):
    """By rank: the ranks whose rows it consumes: itself, its node's peers, then other nodes.

    A rotation, so that at every step each source is wanted by exactly one rank: rank (n, l) takes
    (n + i mod ``nodes``, l + j mod ``ranks_per_node``) for i, then j, from 0 upwards. Sequence of
    tuples; each is made when it is asked for.
    """

    nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)

    def __len__(self) -> int:
        return self.nodes * self.ranks_per_node

    def __getitem__(self, rank: int) -> tuple[int, ...]:
        return self._rotated(rank, 1)

    def consumers(self, rank: int) -> tuple[int, ...]:
        """By step: the rank that consumes ``rank``'s rows then."""
        return self._rotated(rank, -1)

    def _rotated(self, rank: int, way: int) -> tuple[int, ...]:
        if not 0 <= rank < len(self):
            raise IndexError(f"rank {rank} of a world of {len(self)}")
        nodes, each = self.nodes, self.ranks_per_node
        node, local = divmod(rank, each)
        return tuple(
            (node + way * i) % nodes * each + (local + way * j) % each
            for i in range(nodes)
            for j in range(each)
        )

    def __iter__(self) -> Iterator[tuple[int, ...]]:  # type: ignore[override]
        return map(self.__getitem__, range(len(self)))
