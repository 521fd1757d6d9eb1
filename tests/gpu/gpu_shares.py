"""Which GPUs each of xdist's workers uses, before CUDA starts in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest


def visible() -> list[str]:
    """This process's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        return [name for name in told.split(",") if name]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def share(worker: str, gpus: Sequence[str], each: int) -> list[str]:
    """Those of a worker, ``gw0`` and so on: whole groups of ``each``, by turns. UsageError where there
    is none."""
    if not 1 <= each <= len(gpus):
        raise pytest.UsageError(f"--gpus-per-worker {each}: there are {len(gpus)} GPUs here")
    first = int(worker.removeprefix("gw")) % (len(gpus) // each) * each
    return list(gpus[first : first + each])
