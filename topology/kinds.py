"""Kinds of equal nodes, which keep plans of thousands of nodes small.

Nodes that differ only in their id and hostname are of one *kind*. Whatever is decided for a node is
decided for its kind, so the work grows with the kinds of a world, not with its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from mkernel.topology.model import Node, Topology

Spans = tuple[tuple[int, int], ...]
"""Numbers as runs of (first, last), both included: 0, 1, 2, 5 is ((0, 2), (5, 5))."""

_OWN = frozenset({"id", "hostname"})


@dataclass(frozen=True)
class NodeKinds:
    """The kinds of nodes. ``prototypes``: a node of each kind, in order of appearance. ``of``: the
    kind of each node."""

    prototypes: tuple[Node, ...]
    of: tuple[int, ...]

    def nodes(self, kind: int) -> Spans:
        """Return the nodes of a kind."""
        return spans([node for node, its in enumerate(self.of) if its == kind])


def node_kinds(topology: Topology) -> NodeKinds:
    """Return the kinds of a world's nodes."""
    fields = [name for name in Node.model_fields if name not in _OWN]
    prototypes: list[Node] = []
    by_identity: dict[tuple[int, ...], int] = {}
    by_value: dict[tuple[object, ...], int] = {}
    of = []
    for node in topology.nodes:
        parts = tuple(getattr(node, name) for name in fields)
        identity = tuple(map(id, parts))  # copies of a node share their parts
        kind = by_identity.get(identity)
        if kind is None:
            kind = by_identity[identity] = by_value.setdefault(parts, len(prototypes))
            if kind == len(prototypes):
                prototypes.append(node.model_copy(update={"id": 0, "hostname": ""}))
        of.append(kind)
    return NodeKinds(tuple(prototypes), tuple(of))


def spans(numbers: Sequence[int]) -> Spans:
    """Return sorted numbers as runs."""
    runs = groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    return tuple((run[0][1], run[-1][1]) for run in (list(items) for _, items in runs))
