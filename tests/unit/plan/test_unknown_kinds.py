"""Chips, NICs and links of kinds that this tree has never heard of: a third party's backend brings what
the planner must know of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from devices import gpu, nic, node, world
from plan_worlds import CAPABILITIES, make
from pydantic import ValidationError
from shipped import constants_of

from mkernel.plan.pipeline import GemmTile
from mkernel.plan.standard import TileSchedule, by_tiles
from mkernel.probe.matrix import matrix
from mkernel.probe.report import report
from mkernel.topology.cost import load_constants
from mkernel.topology.discover import Discovery
from mkernel.topology.model import Accelerator, FabricLink, Topology
from mkernel.topology.placement import NodePaths, visible


def chip(index: int) -> Accelerator:
    return gpu(index, id=f"tpu{index}", kind="tpu", architecture="v9")


ONE = node(
    (chip(0), chip(1)),
    (nic(0, id="rose0", kind="rose", speed_gbps=800),),
    fabric=(FabricLink(kind="ici", ends=("tpu0", "tpu1"), count=4, gbs=200),),
)


def test_a_plan_of_them(tmp_path: Path) -> None:
    file = tmp_path / "tpu.json"
    rates = constants_of("streams").model_copy(update={"name": "measured by its vendor"})
    file.write_text(rates.model_dump_json())
    claims = CAPABILITIES.model_copy(
        update={
            "simulated": False,
            "kinds": ("tpu",),
            "architectures": ("v9",),
            "constants": load_constants(file),
        }
    )
    assert claims.misfit(chip(0)) is None
    tile = GemmTile(rows=64, columns=512, depth_bytes=256, step_bytes=64)
    made = make(
        capabilities=claims,
        accelerator="third",
        topology=world(ONE, ONE),
        nic="rose",
        schedule=lambda request: by_tiles(request, tile=tile),
    )
    cut = made.part(TileSchedule).chunking
    assert (cut.tile_m, cut.tile_n, cut.tile_k, cut.step_k) == (64, 512, 128, 32)
    assert made.prediction is not None
    assert made.prediction.constants == "measured by its vendor"
    assert made.route(0, 1).kind == "p2p"
    assert made.route(0, 2).kind == "nic"


def test_a_machine_of_them() -> None:
    assert NodePaths(ONE).between(*ONE.accelerators).kind == "ICI"
    assert "ICI" in matrix(ONE)
    machine = world(ONE)
    assert Topology.model_validate_json(machine.model_dump_json()) == machine
    assert report(Discovery(topology=machine))
    left = visible(ONE.accelerators, {"TPU_VISIBLE_CHIPS": "1"}, {"tpu": "TPU_VISIBLE_CHIPS"})
    assert left == (chip(1),)


@pytest.mark.parametrize("kind", ["", "TPU", "a b", "\x1b[31m", "x" * 33])
def test_a_kind_is_a_word(kind: str) -> None:
    with pytest.raises(ValidationError, match="kind"):
        Accelerator(id="a", kind=kind, name="a", index=0)
