"""What drivers and their tools say of the machine that runs this."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mkernel.topology.model import NumaNode
from mkernel.topology.sources import npu, nvml, verbs
from mkernel.topology.sources.findings import Findings


def read(root: Path, numa: Sequence[NumaNode]) -> list[Findings]:
    """Of every driver that is there. ``numa``: the machine's NUMA nodes."""
    return [verbs.read(), nvml.read(root), npu.read(numa)]
