"""Findings of drivers and their tools about the machine that runs this."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mkernel.topology.model import NumaNode
from mkernel.topology.sources import npu, nvml, verbs
from mkernel.topology.sources.findings import Findings


def read(root: Path, numa: Sequence[NumaNode]) -> list[Findings]:
    """Return the findings of every driver that is present. ``numa``: the machine's NUMA nodes."""
    return [verbs.read(), nvml.read(root), npu.read(numa)]
