"""The provenance of figures: commit, hardware, driver, versions."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def provenance(root: Path, commit: str | None = None) -> dict[str, Any]:
    """Return commit, hardware and versions of this run.

    A tree with uncommitted changes to tracked files is ``dirty``: do not quote such figures. Where the
    commit is asserted, nobody looked whether the tree is its: ``dirty`` is None.

    Args:
        root: a folder of the source tree. commit: said instead of asked, where there is no git.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    changes = _git(root, "status", "--porcelain", "-uno", "--", ":/", ":(exclude,top)bench/results")
    return {
        "commit": commit or _git(root, "rev-parse", "HEAD") or "unknown",
        "commit_from": "git" if commit is None else "asserted",
        "dirty": bool(changes) if commit is None else None,
        "date": now.date().isoformat(),
        "time": now.time().isoformat("seconds"),
        "hardware": {"cpu": cpu_model(), "cores": len(os.sched_getaffinity(0))},
        "software": {"python": platform.python_version(), "torch": torch.__version__},
    }


def devices(device: torch.device) -> dict[str, Any]:
    """Describe the accelerators of this host and their driver, as a rank on ``device`` sees them."""
    if device.type != "cuda":
        return {"device": device.type}
    nccl: Any = torch.cuda.nccl
    version = nccl.version()
    return {
        "device": "cuda",
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, version)) if isinstance(version, tuple) else str(version),
    }


def cpu_model() -> str:
    """Return the name of this machine's CPU in /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # NVML is a convenience here: its absence is no reason to fail
        return None


def _git(root: Path, *arguments: str) -> str:
    """Return what git says, nothing where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
