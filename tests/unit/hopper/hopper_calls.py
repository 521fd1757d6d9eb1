"""Calls of plans for Hopper on host memory, of which nothing is started on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import devices
import torch
from plan_walk import WalkedWorld

from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.instrumented import View
from mkernel.backends.contracts.memory import PeerMemory
from mkernel.plan.arguments import scale_sizes
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan, SumShape

GAP = 24
WORKSPACES = (1 << 21, 1 << 30)
ORDER: Any = None
CONTEXT = DispatchContext(0, ORDER, 64)


def gpus(ranks: int = 2, claims: AcceleratorCapabilities | None = None) -> WalkedWorld:
    """Return a world of so many ranks on one node."""
    found = tuple(devices.gpu(i, name="NVIDIA H200") for i in range(ranks))
    return WalkedWorld(HopperAccelerator(), devices.world(devices.node(found)), ranks, claims)


def last_rank(
    made: LaunchPlan,
    view: View = "pipelined",
    *,
    gathered: bool = False,
    symmetric: bool = False,
    offset: int = 0,
    gaps: Sequence[str] = (),
) -> Call:
    """Its call, number 1.

    Args:
        offset: of the tensors, in elements.
        gaps: operands whose rows, in their major order, lie :data:`GAP` elements apart.
    """
    world = made.world_size
    if isinstance(made.shape, SumShape):
        rows = (made.shape.m, made.shape.n)
        return _call(made, view, {name: torch.zeros(rows).bfloat16() for name in ("x", "out")}, {})
    shape = made.gemm
    gathers = made.op == "all_gather_gemm"
    scatters = made.op == "gemm_reduce_scatter"
    sizes = {
        "a": (shape.m // world if gathers else shape.m, shape.k),
        "b": (shape.k, shape.n),
        "out": (shape.m // world if scatters else shape.m, shape.n),
    }
    if gathered:
        sizes["gathered"] = (shape.m, shape.k)
    tensors = {}
    for name, (rows, columns) in sizes.items():
        turned = name == "b" and made.b_layout == "column"
        height, width = (columns, rows) if turned else (rows, columns)
        pitch = width + GAP * (name in gaps)
        narrow = made.scales is not None and name != "out"
        dtype = torch.float8_e4m3fn if narrow else torch.bfloat16
        flat = torch.zeros(height * pitch + 8, dtype=dtype)
        matrix = flat[offset : offset + height * pitch].view(height, pitch)[:, :width]
        tensors[name] = matrix.t() if turned else matrix
    if made.scales is not None:
        of_a, of_b = scale_sizes(made.scales.mode, sizes["a"][0], shape.n, shape.k)
        tensors |= {"a_scale": torch.ones(of_a), "b_scale": torch.ones(of_b[::-1]).t()}
        if gathered:
            tensors["gathered_scale"] = torch.ones(sizes["gathered"][0], of_a[1])
    if made.bias == "launch":
        tensors["bias"] = torch.zeros(shape.n + 8, dtype=torch.bfloat16)[offset : offset + shape.n]
    return _call(made, view, tensors, {"out": (1 << 31, 1 << 32)} if symmetric else {})


def _call(
    made: LaunchPlan,
    view: View,
    tensors: dict[str, torch.Tensor],
    symmetric: dict[str, tuple[int, ...]],
) -> Call:
    world = made.world_size
    return Call(
        plan=made, rank=world - 1, tensors=tensors, epoch=1, number=1, pad=0,
        workspace=WORKSPACES[(world - 1) % 2], areas=(0,),
        peers={0: PeerMemory(0, WORKSPACES[0])} if world > 1 else {}, region=0, fifo=0, timeout_s=1.0,
        view=view, symmetric=symmetric,
    )  # fmt: skip
