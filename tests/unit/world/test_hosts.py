"""Nodes of a group: hosts with as many ranks each, whose ranks follow one another."""

from __future__ import annotations

import pytest

from mkernel.errors import ArgumentError
from mkernel.world.groups import nodes


@pytest.mark.parametrize(
    ("hosts", "count"),
    [("aaaa", 1), ("aabb", 2), ("abcd", 4), ("b", 1), ("ccaabb", 3)],
)
def test_nodes_are_hosts(hosts: str, count: int) -> None:
    assert nodes([(host, 0) for host in hosts], range(len(hosts))) == count


def test_parts_of_a_host_are_nodes() -> None:
    assert nodes([("a", 0), ("a", 0), ("a", 1), ("a", 1)], range(4)) == 2


@pytest.mark.parametrize(
    ("hosts", "ranks", "told"),
    [
        ("aab", [0, 4, 5], r"ranks on a: 0, 4; b: 5 is not legal; .* as many ranks on every host"),
        ("abab", [0, 1, 2, 3], r"a: 0, 2; b: 1, 3 is not legal; .* follow one another"),
        ("abba", [0, 1, 2, 3], r"a: 0, 3; b: 1, 2 is not legal; .* follow one another"),
    ],
)
def test_other_groups_are_refused_by_name(hosts: str, ranks: list[int], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        nodes([(f"{host}/boot/pid", 0) for host in hosts], ranks)
