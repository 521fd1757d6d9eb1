"""Which world of a process is the default one, and how a job's ranks are divided into nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mkernel.errors import AlreadyInitialized, ArgumentError
from mkernel.world import lifecycle
from mkernel.world.environment import Started
from mkernel.world.registry import Registry


def world(name: str) -> Any:
    return SimpleNamespace(name=name, on_end=None, path=None)


def test_the_default_is_the_first_that_may_be_it_and_the_next_after_its_end() -> None:
    worlds = Registry()
    of_a_group, first, second = world("group"), world("first"), world("second")
    worlds.add(of_a_group, default=False)
    assert worlds.default is None
    worlds.add(first, default=True)
    worlds.add(second, default=True)
    assert worlds.default is first
    of_a_group.on_end(of_a_group)
    assert worlds.default is first
    first.on_end(first)
    assert worlds.default is None
    third = world("third")
    worlds.add(third, default=True)
    assert worlds.default is third


def test_a_name_is_given_once_at_a_time() -> None:
    worlds = Registry()
    one = world("one")
    worlds.add(one, default=True)
    with pytest.raises(AlreadyInitialized, match="'one'"), worlds.joining("one"):
        pass
    one.on_end(one)
    with worlds.joining("one"):
        pass


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ((None, None), (2, 4)),  # the hosts
        ((None, 2), (4, 2)),
        ((None, 8), (1, 8)),
        ((4, None), (4, 2)),
        ((8, 1), (8, 1)),
    ],
)
def test_a_job_is_divided_into_nodes(
    asked: tuple[int | None, int | None], found: tuple[int, int]
) -> None:
    made = lifecycle._identity(Started(5, 8, 4, "env://"), *asked)
    assert (made.rank, made.nodes, made.ranks_per_node) == (5, *found)


def test_a_job_that_is_smaller_than_a_host_is_one_node() -> None:
    made = lifecycle._identity(Started(2, 3, 4, "env://"), None, None)
    assert (made.nodes, made.ranks_per_node) == (1, 3)


def test_nodes_that_do_not_divide_a_job_are_refused() -> None:
    with pytest.raises(ArgumentError, match="3 x 2 ranks = 6"):
        lifecycle._identity(Started(0, 8, 8, "env://"), 3, None)


def test_every_world_of_a_group_has_keys_of_its_own() -> None:
    found = [lifecycle._prefix(name) for name in ("a group", "a group", "another", "a group")]
    assert len({*found[:2], found[3]}) == 3
    assert len(set(found[0].split("/"))) == 3
