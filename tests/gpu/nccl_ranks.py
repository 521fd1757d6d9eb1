"""Makes torch.distributed of a job's ranks over NCCL, as a program on GPUs does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed

import mkernel


@contextmanager
def over_nccl(folder: str) -> Iterator[tuple[int, int]]:
    """Leave the job's world, and make torch.distributed with a GPU for each rank; yield this rank and
    their number. At the end all worlds end, too."""
    mkernel.finalize()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl", init_method=f"file://{folder}/torch", rank=rank, world_size=ranks
    )
    try:
        yield rank, ranks
    finally:
        mkernel.finalize()
        distributed.destroy_process_group()
