"""What rank processes of test_whole_layers run: turns of a way of which one part is wrong."""

from __future__ import annotations

import torch
import whole_layers
from torch import Tensor, distributed

import mkernel


class KeepsItsPart(whole_layers.Library):
    """Its own rows of its own products: nothing comes from other ranks."""

    name = "keeps its part"

    def scatter(self, x: Tensor, w: Tensor) -> Tensor:
        rows = x.shape[0] // distributed.get_world_size()
        return (x @ w)[distributed.get_rank() * rows :][:rows]


class ForgetsAGradient(whole_layers.Library):
    """Of the first product the rows of other ranks count as constants."""

    name = "forgets a gradient"

    def gather(self, x: Tensor, w: Tensor) -> Tensor:
        whole = super().gather(x, w)
        rows = x.shape[0]
        own = distributed.get_rank() * rows
        rest = [whole[:own].detach(), whole[own : own + rows], whole[own + rows :].detach()]
        return torch.cat(rest)


def turns() -> dict[str, object]:
    """By contender: a time, or what was found wrong."""
    device = whole_layers.Device(cuda=False)
    with whole_layers.default_group(device):
        layer = whole_layers.layers(64, mkernel.world().size)[0]
        case = whole_layers.Case(layer, 128, True, device)
        ways = [whole_layers.Library(), KeepsItsPart(), ForgetsAGradient(), whole_layers.Mkernel()]
        found: dict[str, object] = dict(whole_layers.take_turns(case, ways, "eager", 1, device))
        return found
