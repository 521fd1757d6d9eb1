"""torch.distributed's group of all ranks of a world."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import PrefixStore

import mkernel

LIMIT = timedelta(seconds=300)
_MADE = itertools.count()


@contextmanager
def default_group(cuda: bool) -> Iterator[None]:
    """Make it where the world has not, and end it. Ranks that share a GPU get none: NCCL refuses."""
    world = mkernel.world()
    if distributed.is_initialized() or (cuda and torch.cuda.device_count() < world.size):
        yield
        return
    # A group that finds an earlier one's addresses in the store connects to nobody.
    store = PrefixStore(f"torch group {next(_MADE)}", world.group_store)
    distributed.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=world.rank,
        world_size=world.size, timeout=LIMIT,
    )  # fmt: skip
    try:
        yield
    finally:
        distributed.destroy_process_group()
