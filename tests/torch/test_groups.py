"""Worlds of groups: tensor, data and expert parallel groups side by side in one job."""

from __future__ import annotations

from pathlib import Path

import pytest
from groups_in_ranks import EVERY_OP, TIMEOUT_S, mesh_2x2, ranks

import mkernel
from mkernel.cases.base import TOLERANCE

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
