"""Writes a benchmark's figures beside what they were measured on: commit, hardware, versions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mkernel.harness.provenance import provenance

ROOT = Path(__file__).parents[1]


def write(name: str, figures: dict[str, Any]) -> None:
    """Print ``figures`` with their provenance and write ``bench/results/<name>.json``.

    A tree with uncommitted changes to tracked files is marked ``dirty``: do not quote such figures.
    MKERNEL_COMMIT says which commit the tree is of where there is no git to ask.
    """
    commit = os.environ.get("MKERNEL_COMMIT")
    content = {"benchmark": name, **provenance(ROOT, commit), "figures": figures}
    text = json.dumps(content, indent=2)
    path = ROOT / "bench" / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(text)
