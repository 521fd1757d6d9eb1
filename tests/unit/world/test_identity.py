"""Where ranks stand: node by node, and within a node one after another."""

from __future__ import annotations

from mkernel.world.identity import Identity


def test_ranks_go_node_by_node() -> None:
    ranks = [Identity(rank, nodes=2, ranks_per_node=3) for rank in range(6)]
    assert [each.node for each in ranks] == [0, 0, 0, 1, 1, 1]
    assert [each.local_rank for each in ranks] == [0, 1, 2, 0, 1, 2]
    assert {each.size for each in ranks} == {6}
    assert {each.node_of for each in ranks} == {(0, 0, 0, 1, 1, 1)}
