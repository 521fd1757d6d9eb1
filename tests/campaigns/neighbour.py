"""A second process that has nothing to do with the soaked worlds, but the machine in common."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

import torch

_SIZES = (64, 256, 700)
_SHARE = 0.1
"""Of a CPU or a device that it takes."""


def neighbour(pipe: Connection) -> None:
    """Multiply matrices until the driver is gone, and tell it what was wrong with a product."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parent, turn = os.getppid(), 0
    while os.getppid() == parent:
        began = time.monotonic()
        size = _SIZES[turn % len(_SIZES)]
        rows = torch.arange(size, device=device, dtype=torch.float32) % 7
        product = rows[:, None].expand(size, size) @ torch.ones(size, size, device=device)
        if not bool((product == rows[:, None] * size).all()):
            pipe.send(f"the process beside them: product {turn} of size {size} is wrong")
        del product
        turn += 1
        time.sleep((time.monotonic() - began) * (1 / _SHARE - 1))
