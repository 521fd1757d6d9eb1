"""Properties that CUDA chips have whichever backend runs on them, from ``chips.json`` beside this
file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from mkernel.topology.cost import MachineConstants
from mkernel.topology.defaults import Sourced
from mkernel.topology.model import Model

FILE = Path(__file__).with_name("chips.json")


class Chip(Sourced):
    """One architecture. ``rates``: those machine constants that belong to the chip itself, by name."""

    cores: int = Field(ge=1)
    rates: dict[str, float]


class _File(Model):
    chips: dict[str, Chip]


@cache
def chips() -> Mapping[str, Chip]:
    """Return the known chips, by architecture (``sm_90``)."""
    return _File.from_file(FILE, "file of chips").chips


class ChipMachine(Model):
    """Devices of one kind in a backend's data file: the number of cores of one, and the constants.
    A ``chip`` in the file supplies the cores and those constants that belong to the chip itself."""

    cores: int = Field(ge=1)
    constants: MachineConstants | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_chip(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or "chip" not in tree:
            return tree
        name, own = tree["chip"], tree["constants"]
        if name not in chips():
            raise ValueError(f"chip {name!r} is unknown; {FILE.name} has: {', '.join(chips())}")
        chip = chips()[name]
        twice = sorted(chip.rates.keys() & own.keys())
        if twice:
            raise ValueError(f"{', '.join(twice)}: {FILE.name} has it for {name!r} already")
        constants = {
            **own,
            **chip.rates,
            "architectures": (name,),
            "source": f"{own['source']}. Chip: {chip.source}",
        }
        rest = {key: value for key, value in tree.items() if key != "chip"}
        return {**rest, "cores": chip.cores, "constants": constants}
