"""Writes a benchmark's figures beside what they were measured on: commit, hardware, versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def write(name: str, figures: dict[str, Any]) -> None:
    """Print ``figures`` with their provenance and write ``bench/results/<name>.json``.

    A tree with uncommitted changes to tracked files is marked ``dirty``: do not quote such figures.
    """
    content = {"benchmark": name, **provenance(), "figures": figures}
    text = json.dumps(content, indent=2)
    path = ROOT / "bench" / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(text)


def provenance() -> dict[str, Any]:
    """Commit, hardware and versions of this run."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "-uno", "--", ":!bench/results")),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "hardware": {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0))},
        "software": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
