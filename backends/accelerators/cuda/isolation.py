"""Rows of ``mkernel doctor`` about modes in which CUDA devices do not reach each other's memory."""

from __future__ import annotations

from mkernel.backends.contracts.status import Status
from mkernel.topology.sources import nvml

_INSTEAD = "use accelerator streams with MKERNEL_STREAMS_COPIES=0"


def isolation() -> tuple[tuple[str, Status], ...]:
    """Return a row for each mode that is on: its name, and what to use instead."""
    found = nvml.isolation()
    rows = []
    if found.mig:
        gpus = ",".join(map(str, found.mig))
        detail = f"on for GPU {gpus}: slices do not reach each other's memory"
        remedy = f"turn it off (`nvidia-smi -i {gpus} -mig 0`), or {_INSTEAD} and one slice of each"
        rows.append(("MIG", Status(False, detail, remedy)))
    if found.confidential:
        detail = "on: drivers do not share GPUs' memory between processes then"
        remedy = f"{_INSTEAD}, or GPUs without this mode"
        rows.append(("confidential computing", Status(False, detail, remedy)))
    return tuple(rows)
