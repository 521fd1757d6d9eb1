"""Machines that are described already, which a name stands for wherever a topology file is taken.

Each is a file of ``topology/machines``, a description as users write their own
(:mod:`mkernel.topology.sources.description`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from mkernel.topology.model import Note
from mkernel.topology.sources.description import Description

_FOLDER = Path(__file__).parent / "machines"


@cache
def presets() -> Mapping[str, Description]:
    """Return the descriptions by their first names, sorted."""
    return {
        file.stem: Description.from_file(file, "preset topology")
        for file in sorted(_FOLDER.glob("*.json"))
    }


def find(name: str) -> Path | None:
    """Return the file of the preset that a name stands for, in upper or lower case; None: of none."""
    wanted = name.lower()
    for first, described in presets().items():
        if wanted in (first, *described.aliases):
            return _FOLDER / f"{first}.json"
    return None


def note(name: str) -> Note | None:
    """Return what readers of a preset should know; None where the name is that of a file."""
    file = find(name)
    if file is None:
        return None
    return Note(
        source=f"preset {file.stem}",
        message="described from public figures, never measured: mkernel never ran on such a machine",
    )
