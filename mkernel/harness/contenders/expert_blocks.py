"""Steps of experts in e4m3, with scales by blocks or by rows, beside their products: one kernel each on
a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mkernel.backends.contracts.scaled import quantised_blocks, quantised_rows
from mkernel.cases.moe import gated
from mkernel.harness.contenders.compiled import compiled
from mkernel.plan.model import BLOCK

_SOME_ROWS = (64, 192)
"""Two numbers of rows, after which torch's kernels take any."""


def quantised(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(gate) · up of rows, whose columns are the gates', then the ups', in e4m3, and the
    scales."""
    found: tuple[Tensor, Tensor] = _run(_quantised, both)
    return found


def quantised_whole(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return what :func:`quantised` does with one scale a row, [rows, 1]."""
    found: tuple[Tensor, Tensor] = _run(_quantised_whole, both)
    return found


def rounded(both: Tensor) -> Tensor:
    """Return silu(gate) · up, as e4m3 has it, in bfloat16."""
    found: Tensor = _run(_rounded, both)
    return found


def widened(rows: Tensor, scale: Tensor) -> Tensor:
    """Return e4m3 rows times their scales [rows, K / 128] in bfloat16."""
    found: Tensor = _run(_widened, rows, scale)
    return found


@cache
def prepare(device: torch.device, columns: int) -> None:
    """Compile all steps for rows of so many columns, of any number, on a GPU."""
    if device.type == "cpu":
        return
    for rows in _SOME_ROWS:
        both = torch.zeros(rows, 2 * columns, dtype=torch.bfloat16, device=device)
        rounded(both)
        quantised_whole(both)
        widened(*quantised(both))


def _quantised(both: Tensor) -> tuple[Tensor, Tensor]:
    return quantised_blocks(gated(both.float()))


def _quantised_whole(both: Tensor) -> tuple[Tensor, Tensor]:
    return quantised_rows(gated(both.float()))


def _rounded(both: Tensor) -> Tensor:
    return _widened(*_quantised(both))


def _widened(rows: Tensor, scale: Tensor) -> Tensor:
    blocks = rows.float().reshape(*scale.shape, BLOCK) * scale[:, :, None]
    return blocks.flatten(1).to(torch.bfloat16)


def _run(step: Callable[..., Any], *tensors: Tensor) -> Any:
    return (step if tensors[0].device.type == "cpu" else compiled(step, None))(*tensors)
