"""Marks that tell which world made the words of an MoE handle.

The last word is its mark. On a device reading it would wait for everything that is queued, so what a
dispatch of this process marked is also remembered beside the memory, for as long as that lives.
"""

from __future__ import annotations

import zlib
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mkernel.world.world import World

_marked: WeakKeyDictionary[torch.UntypedStorage, tuple[int, int]] = WeakKeyDictionary()


def mark(world: World) -> int:
    """Return the world's mark."""
    return zlib.crc32(world.name.encode()) & 0x7FFFFFFF


def remember(routing: Tensor, world: World) -> None:
    """Remember that a dispatch of that world has just made these words."""
    _marked[routing.untyped_storage()] = _version(routing), mark(world)


def is_foreign(routing: Tensor, world: World) -> bool:
    """Return whether another world made these words; False also where only the device knows."""
    if routing.device.type == "cpu":
        return int(routing[-1]) != mark(world)
    version, made_by = _marked.get(routing.untyped_storage(), (-1, 0))
    return version == _version(routing) and made_by != mark(world)


def _version(words: Tensor) -> int:
    return 0 if words.is_inference() else words._version
