"""Constants lie once, in a data file beside their backend or in topology/data, each with its source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mkernel.backends import registry
from mkernel.backends.accelerators.cuda import chips
from mkernel.backends.accelerators.cuda import machine as hopper
from mkernel.errors import InputFileError

ROOT = Path(__file__).parents[2]
SHIPPED = tuple(
    name
    for name in registry.names(registry.ACCELERATORS)
    if name in ("ascend", "hopper", "streams")
)
DATA = sorted((ROOT / "topology" / "data").iterdir())
FILES = [*DATA, chips.FILE, *(registry.accelerator(n).machine_file for n in SHIPPED)]


def sections(tree: Any, where: str = "", sourced: bool = False) -> Iterator[tuple[str, bool]]:
    """Every object with numbers of its own: where, and whether it or one around it has a source."""
    if isinstance(tree, dict):
        sourced = sourced or bool(tree.get("source"))
        if any(isinstance(value, int | float) for value in tree.values()):
            yield where, sourced
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in items:
        yield from sections(value, f"{where}.{key}", sourced)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_number_has_a_source_in_words(file: Path) -> None:
    found = list(sections(json.loads(file.read_text())))
    assert found
    assert [where for where, sourced in found if not sourced] == []


def test_schedules_follow_the_file() -> None:
    from mkernel.backends.accelerators.hopper.gemm import tuning

    made = hopper.machine()
    assert tuning.BAND is made.tilings.band
    clusters = made.tilings.clusters
    assert {**clusters, "deep": clusters["wide"]} == tuning.CLUSTER_TILES
    rate = made.constants.bfloat16_tflops_per_core
    tile = tuning._Tiles("wide", 1024, 1024, 4096, 4, rate)
    assert tile.tile_us == 2 * 128 * 256 * 4096 / (rate * 1e6)
    assert rate == chips.cards()["h200"].rates["bfloat16_tflops_per_core"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chip": "sm_11"}, "chip 'sm_11' is unknown; chips.json has: sm_90"),
        (
            {"constants": {"memory_gbs": 4000.0}},
            "memory_gbs: chips.json has it for 'sm_90' already",
        ),
        ({"copies": None}, "copies"),
    ],
)
def test_a_number_twice_and_a_wrong_file_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tree = json.loads(hopper.FILE.read_text())
    own = change.get("constants")
    changed = {**tree, **change, "constants": tree["constants"] | (own or {})}
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(changed))
    with pytest.raises(InputFileError, match=message):
        hopper.CudaMachine.from_file(file, "constants")
