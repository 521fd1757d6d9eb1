"""Run in the rank processes of test_prefill: a layer that is right, and one that is not."""

from __future__ import annotations

import prefill
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch_group import default_group
from turns import Place

import mkernel


def planted() -> tuple[list[str], list[str]]:
    """Return what is wrong of a layer, and of one whose experts get each other's rows."""
    shape, limit = prefill.Shape("tiny", 40, torch.float32), prefill.LIMIT[torch.float32]
    with default_group(cuda=False), torch.no_grad():
        place = Place(cuda=False)
        one = init_device_mesh("cpu", (place.ranks, 1), mesh_dim_names=("all", "one"))["one"]
        mkernel.init(one)
        layer = prefill.Layer(shape, place, one)
        right = layer.wrong(limit)
        layer.counts = layer.counts[1:] + layer.counts[:1]
        return right, layer.wrong(limit)
