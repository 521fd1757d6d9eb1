"""Faults of e4m3 experts that tests of layers plant."""

from __future__ import annotations

from typing import Any

import torch

import mkernel
from mkernel.nn import ExpertParallelMLP


def swap_halves(layer: ExpertParallelMLP) -> None:
    for each in (layer.gate_up_proj, layer.gate_up_proj_scale_inv):
        gate, up = each.chunk(2, 1)
        each.copy_(torch.cat((up, gate), 1))


def lose(layer: ExpertParallelMLP) -> None:
    if mkernel.world().rank == 1:
        layer.down_proj_scale_inv.fill_(1 / 64)


def next_expert(layer: ExpertParallelMLP) -> None:
    layer.down_proj_scale_inv.copy_(layer.down_proj_scale_inv.roll(1, 0))


def neighbour(name: str, dim: int) -> Any:
    def plant(layer: ExpertParallelMLP) -> None:
        scale = getattr(layer, name)
        scale.copy_(scale.roll(1, dim))

    return plant


FAULTS: dict[str, Any] = {
    "none": lambda layer: None,
    "the scale of the next block of gate and up": neighbour("gate_up_proj_scale_inv", 2),
    "the scale of the block below in gate and up": neighbour("gate_up_proj_scale_inv", 1),
    "the scale of the next block of down": neighbour("down_proj_scale_inv", 2),
    "the scale of the next expert": next_expert,
    "scales lost on one rank": lose,
    "gate and up swapped": swap_halves,
}
