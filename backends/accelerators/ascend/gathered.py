"""The gathered A of a finished call, from the staging slots of the workspace.

May run after the kernels have released the slots: a peer writes this epoch's parity again in epoch
e + 2, which it reaches only after epoch e + 1, for which it needs rows that this rank sends after
this call has returned.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from mkernel.backends.contracts.accelerator import Call

if TYPE_CHECKING:
    from mkernel.backends.accelerators.ascend import _ascend


def unpack_gathered(call: Call, geometry: _ascend.AgGemmGeometry) -> None:
    """Fill ``call.tensors["gathered"]`` [M, K]: own rows from ``a``, others from their slots."""
    whole, own = call.tensors["gathered"], call.tensors["a"]
    rows, cut = len(own), call.plan.chunking
    assert cut is not None, "the launch checked it"
    for source in range(call.plan.world_size):
        part = whole[source * rows : (source + 1) * rows]
        if source == call.rank:
            part.copy_(own)
        else:
            offset = geometry.slot_offset(call.epoch & 1, source)
            _unpack_slot(part, call.workspace + offset, cut.tile_m, cut.tile_k)


def _unpack_slot(part: torch.Tensor, address: int, tile_m: int, tile_k: int) -> None:
    """A slot's tiles, each dense in its valid size, row group by row group, K fastest."""
    rows, k = part.shape
    memory = (ctypes.c_byte * (part.numel() * part.element_size())).from_address(address)
    slot = torch.frombuffer(memory, dtype=part.dtype)
    done = 0
    for row in range(0, rows, tile_m):
        height = min(tile_m, rows - row)
        for column in range(0, k, tile_k):
            width = min(tile_k, k - column)
            tile = slot[done : done + height * width].view(height, width)
            part[row : row + height, column : column + width] = tile
            done += height * width
