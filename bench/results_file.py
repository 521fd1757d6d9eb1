"""Files of ``bench/results``: writes a benchmark's figures beside what they were measured on (commit,
hardware, versions), and reads those of any format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from mkernel.errors import InputFileError
from mkernel.harness import gpu_tests, modelled, results
from mkernel.harness.provenance import devices, provenance
from mkernel.schema_version import refusal

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
FORMAT = "mkernel-figures-1"
"""Of a benchmark here; those of `mkernel bench` and pytest have their own."""
_READ = (
    FORMAT,
    results.FORMAT,
    gpu_tests.FORMAT,
    modelled.ModelledReport.model_fields["format"].default,
    modelled.ComparisonReport.model_fields["format"].default,
)


def described(benchmark: str, figures: dict[str, Any]) -> dict[str, Any]:
    """A result: ``figures`` and what they were measured on, GPUs too. MKERNEL_COMMIT says which commit
    the tree is of where there is no git to ask."""
    found = provenance(ROOT, os.environ.get("MKERNEL_COMMIT"))
    if torch.cuda.is_available():
        found["hardware"] |= devices(torch.device("cuda"))
    return {"format": FORMAT, "benchmark": benchmark, **found, "figures": figures}


def write(name: str, figures: dict[str, Any]) -> None:
    """Print ``figures`` with their provenance and write ``bench/results/<name>.json``.

    A tree with uncommitted changes to tracked files is marked ``dirty``: do not quote such figures.
    """
    text = json.dumps(described(name, figures), indent=2)
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(text)


def read(name: str, folder: Path = RESULTS) -> Any:
    """The JSON object of ``<name>.json``. InputFileError: it has no format, or another version's."""
    content = json.loads((folder / f"{name}.json").read_text())
    told = content.get("format")
    if told not in _READ:
        raise InputFileError(
            f"result {folder / name}.json: format: {refusal(told, ' or '.join(map(repr, _READ)))}"
        )
    return content
