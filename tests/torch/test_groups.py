"""Worlds of groups: tensor, data and expert parallel groups side by side in one job."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from groups_in_ranks import EVERY_OP, TIMEOUT_S, gathers, mesh_2x2, ranks, reduces
from torch import distributed

import mkernel
from mkernel.cases.base import TOLERANCE
from mkernel.errors import PeerFailure, Timeout
from mkernel.world.groups import Group

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

ACCELERATORS = ["streams", "ascend"]
LIMIT = TOLERANCE["float32"]


# ---- side by side --------------------------------------------------------------------------------


def two_dimensions(accelerator: str) -> list[tuple[str, str, float]]:
    mesh = mesh_2x2()
    names = {}
    for dimension in ("tp", "dp"):
        world = mkernel.init(mesh[dimension], accelerator=accelerator, timeout_s=TIMEOUT_S)
        assert world.name == mesh[dimension].get_group().group_name
        assert (world.size, world.rank) == (2, mesh.get_local_rank(dimension))
        names[dimension] = world.name
    assert mkernel.world() is mkernel.world(mesh["tp"]), "the first world is the default"
    return [
        (dimension, op.__name__, op(group, turn))
        for turn, op in enumerate(EVERY_OP)
        for dimension, group in (
            ("tp", mesh["tp"]), ("dp", mesh["dp"].get_group()), ("tp", None), ("dp", names["dp"]),
            ("tp", mkernel.world(mesh["tp"])),
        )
    ]  # fmt: skip


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_every_op_in_two_dimensions(accelerator: str, tmp_path: Path) -> None:
    for found in ranks(two_dimensions, tmp_path, accelerator):
        assert len(found) == 25
        assert [one for one in found if not one[2] <= LIMIT] == []


def one_after_another(accelerator: str, order: list[str]) -> list[float]:
    mesh = mesh_2x2()
    groups: dict[str, Group] = {"tp": mesh["tp"], "dp": mesh["dp"], "all": distributed.group.WORLD}
    for group in groups.values():
        mkernel.init(group, accelerator=accelerator, timeout_s=TIMEOUT_S)
    found = []
    for ending in order:
        found += [gathers(group, turn) for turn, group in enumerate(groups.values())]
        mkernel.finalize(group=groups.pop(ending))
    again = mkernel.init(mesh["tp"], accelerator=accelerator, timeout_s=TIMEOUT_S)
    assert mkernel.world() is again, "there was no default world any more"
    return [*found, gathers(None), reduces(mesh["tp"])]


@pytest.mark.parametrize(
    ("accelerator", "order"),
    [
        ("streams", ["tp", "dp", "all"]),
        ("streams", ["all", "dp", "tp"]),
        ("ascend", ["dp", "tp", "all"]),
    ],
)
def test_worlds_end_in_any_order(accelerator: str, order: list[str], tmp_path: Path) -> None:
    for found in ranks(one_after_another, tmp_path, accelerator, order):
        assert len(found) == 8
        assert max(found) <= LIMIT


def in_the_backends_default_group(nodes: int) -> list[tuple[int, float]]:
    """The launched world's accelerator has made torch's default group; meshes are made of that."""
    mesh = mesh_2x2()
    found = []
    for dimension in ("tp", "dp"):
        world = mkernel.init(mesh[dimension])
        assert world.backends == mkernel.world().backends
        assert world.settings.timeout_s == TIMEOUT_S
        found.append((world.identity.nodes, gathers(mesh[dimension])))
    mkernel.finalize(group=mkernel.world())
    return [*found, (nodes, gathers(mesh["dp"])), (nodes, gathers(mesh["tp"]))]


@pytest.mark.parametrize("nodes", [1, 2])
def test_groups_of_a_launched_world(nodes: int) -> None:
    """Nodes that the launch emulates are those of its groups too."""
    everywhere = mkernel.launch(
        in_the_backends_default_group, nodes,
        nodes=nodes, ranks_per_node=4 // nodes, accelerator="streams", timeout_s=TIMEOUT_S,
    )  # fmt: skip
    for found in everywhere:
        assert [count for count, _ in found[:2]] == [1, nodes]
        assert max(error for _, error in found) <= LIMIT


# ---- failures ------------------------------------------------------------------------------------


def one_breaks(accelerator: str) -> list[float]:
    mesh = mesh_2x2()
    tp = mkernel.init(mesh["tp"], accelerator=accelerator, timeout_s=TIMEOUT_S)
    mkernel.init(mesh["dp"], accelerator=accelerator, timeout_s=TIMEOUT_S)
    found = [gathers(tp), gathers(mesh["dp"])]
    if distributed.get_rank() == 1:
        tp.close(ValueError("rank 1 has had enough"))
    elif distributed.get_rank() == 0:
        with pytest.raises(PeerFailure, match="rank 1 has had enough"):
            gathers(tp, 1)
        tp.close()
    found += [gathers(mesh["dp"], turn) for turn in range(2, 6)]
    if distributed.get_rank() < 2:
        mkernel.init(mesh["tp"], accelerator=accelerator, timeout_s=TIMEOUT_S)
    return [*found, gathers(mesh["tp"], 6), gathers(mesh["dp"], 7)]


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_a_broken_world_leaves_the_others_usable(accelerator: str, tmp_path: Path) -> None:
    for found in ranks(one_breaks, tmp_path, accelerator):
        assert len(found) == 8
        assert max(found) <= LIMIT


SHORT_S = 3.0


def calls_in_two_orders(accelerator: str, known: bool) -> tuple[str, float]:
    one, other = distributed.new_group([0, 1]), distributed.new_group([0, 1])
    for group in (one, other):
        mkernel.init(group, accelerator=accelerator, timeout_s=TIMEOUT_S)
        if known:
            gathers(group)
        mkernel.world(group).set_timeout(SHORT_S)
    start = time.monotonic()
    with pytest.raises(Timeout) as caught:
        gathers(one if distributed.get_rank() == 0 else other)
    with contextlib.suppress(Timeout):  # of the world in which the other rank was
        mkernel.finalize()
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("known", [False, True], ids=["new to them", "known"])
@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_calls_in_two_orders_end_by_the_deadline(
    accelerator: str, known: bool, tmp_path: Path
) -> None:
    for rank, (text, seconds) in enumerate(
        ranks(calls_in_two_orders, tmp_path, accelerator, known, size=2)
    ):
        assert seconds < SHORT_S + 10
        assert f"Rank {1 - rank} was busy with world" in text
        assert "one order" in text


def made_in_two_orders() -> tuple[str, float]:
    groups = [distributed.new_group([0, 1]), distributed.new_group([0, 1])]
    start = time.monotonic()
    with pytest.raises(Timeout) as caught:
        mkernel.init(groups[distributed.get_rank()], accelerator="streams", timeout_s=SHORT_S)
    return str(caught.value), time.monotonic() - start


def test_worlds_made_in_two_orders_end_by_the_deadline(tmp_path: Path) -> None:
    for rank, (text, seconds) in enumerate(ranks(made_in_two_orders, tmp_path, size=2)):
        assert seconds < SHORT_S + 10
        assert f"ranks [{1 - rank}] did not come" in text
        assert "several in one order" in text
