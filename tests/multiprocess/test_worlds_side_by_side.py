"""Two worlds of the same ranks at the same time share nothing: neither ends with the other."""

from __future__ import annotations

import threading
import time

import kept_ranks
import pytest
from in_world import DEADLINE_S, gathers, stores

import mkernel
from mkernel.cases.base import TOLERANCE
from mkernel.errors import PeerFailure
from mkernel.launch import host_store
from mkernel.world import lifecycle
from mkernel.world.world import World

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def beside(port: int, prefix: str = "beside") -> World:
    """Another world like the default one, over a store of its own."""
    like = mkernel.world()
    return lifecycle.join(like.identity, like.backends, like.settings, stores(port), prefix)


def works(world: World, turn: int) -> None:
    """A call in this world has the right result; sizes and values differ with the turn."""
    error = gathers(turn, rows=16 * (turn % 3 + 1), group=world)
    assert error <= TOLERANCE["float32"], f"call {turn}"


def alternates(port: int, default_ends_first: bool) -> None:
    worlds = [mkernel.world(), beside(port)]
    assert worlds[0].accelerator is not worlds[1].accelerator
    for turn in range(8):
        works(worlds[turn % 2], turn)
    for turn in range(8, 12):
        works(worlds[turn // 2 % 2], turn)
    if default_ends_first:
        mkernel.finalize(group=worlds[0])
        rest = worlds[1]
    else:
        worlds[1].close()
        rest = worlds[0]
    for turn in range(12, 16):
        works(rest, turn)
    if default_ends_first:
        rest.close()


@pytest.mark.parametrize(
    ("accelerator", "nodes", "default_ends_first"),
    [("streams", 1, True), ("streams", 2, False), ("ascend", 1, False), ("ascend", 2, True)],
)
def test_two_worlds_take_turns(accelerator: str, nodes: int, default_ends_first: bool) -> None:
    store, port = host_store(2 * nodes, 30)
    kept_ranks.run(
        alternates, port, default_ends_first,
        nodes=nodes, ranks_per_node=2, accelerator=accelerator
    )  # fmt: skip
    del store


def threads_left(port: int) -> int:
    before = threading.active_count()
    for number in range(4):
        world = beside(port, f"world {number}")
        works(world, number)
        world.close()
    deadline = time.monotonic() + DEADLINE_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return threading.active_count() - before


@pytest.mark.parametrize("accelerator", ["streams", "ascend"])
def test_worlds_leave_no_thread(accelerator: str) -> None:
    store, port = host_store(2, 30)
    found = kept_ranks.run(
        threads_left, port, ranks_per_node=2, accelerator=accelerator
    )  # fmt: skip
    assert found == [0, 0]
    del store


def fails_beside(port: int) -> None:
    first, other = mkernel.world(), beside(port)
    works(first, 0)
    works(other, 1)
    works(first, 2)  # ends on no rank before all have left the other world's call
    if other.rank == 1:
        other.close(ValueError("rank 1 has had enough"))
    else:
        with pytest.raises(PeerFailure, match="rank 1 has had enough"):
            works(other, 3)
        other.close()
    for turn in range(4, 6):
        works(first, turn)
    again = beside(port, "beside, again")
    works(again, 6)
    works(first, 7)
    again.close()


@pytest.mark.parametrize(("accelerator", "nodes"), [("streams", 2), ("ascend", 1), ("ascend", 2)])
def test_a_world_outlives_the_failure_of_another(accelerator: str, nodes: int) -> None:
    store, port = host_store(2 * nodes, 30)
    kept_ranks.run(
        fails_beside, port,
        nodes=nodes, ranks_per_node=2, accelerator=accelerator
    )  # fmt: skip
    del store
