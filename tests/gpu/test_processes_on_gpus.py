"""Programs whose processes are set up in other ways: by torch's allocator, or with one GPU for each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device_buffers import needs_gpus

RANK = Path(__file__).with_name("process_ranks.py")

pytestmark = [needs_gpus(2), pytest.mark.usefixtures("leaves_nothing")]


def found(torchrun: list[str], *options: str, **environment: str) -> str:
    """Return what two ranks print of eager calls and replays of graphs, all judged."""
    ended = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(RANK), *options],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (RANK.parents[1], RANK.parent, *sys.path))),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def test_expandable_segments(torchrun: list[str]) -> None:
    """Segments of torch's allocator grow in place, of physical memory that is mapped in pieces."""
    how = "expandable_segments:True"
    told = found(torchrun, PYTORCH_CUDA_ALLOC_CONF=how, PYTORCH_ALLOC_CONF=how)
    seen = torch.cuda.device_count()
    for rank in range(2):
        right = f"rank {rank} sees {seen} GPU(s), expandable segments True: 0 failures []"
        assert right in told, told


def test_processes_that_see_one_gpu_each(torchrun: list[str]) -> None:
    """SLURM with ``--gpus-per-task`` and Ray start ranks so: each rank's device is number 0."""
    told = found(torchrun, "--one-gpu")
    for rank in range(2):
        right = f"rank {rank} sees 1 GPU(s), expandable segments False: 0 failures []"
        assert right in told, told
