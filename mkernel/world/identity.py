"""The place of a rank in its world, and the backends that the world runs on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Identity:
    """The place of a rank in its world. ``rank`` = ``node * ranks_per_node + local_rank``."""

    rank: int
    nodes: int
    ranks_per_node: int

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def node(self) -> int:
        """Return the index of this rank's node."""
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """Return the index of this rank in its node."""
        return self.rank % self.ranks_per_node

    @property
    def node_of(self) -> tuple[int, ...]:
        """Return the node of every rank."""
        return tuple(rank // self.ranks_per_node for rank in range(self.size))


@dataclass(frozen=True)
class Backends:
    """Names of what a world runs on. ``nic`` and ``verbs`` are None in a world of one node, and where a
    process group carries what crosses nodes. ``companions``: accelerators for the ops that those before
    them do not have, in this order."""

    accelerator: str
    nic: str | None
    verbs: str | None
    companions: tuple[str, ...] = ()

    @property
    def accelerators(self) -> tuple[str, ...]:
        """Return all accelerators, in order."""
        return (self.accelerator, *self.companions)
