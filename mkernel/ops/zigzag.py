"""The zigzag split of a causal sequence: 2·W pieces, of which rank r holds pieces r and 2·W - 1 - r.

Early positions attend to few others and late ones to many; so split, all ranks have the same work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mkernel.errors import ArgumentError, ShapeError


def zigzag_positions(sequence: int, world_size: int, rank: int) -> Tensor:
    """Return the positions [sequence / W] (int64), in order, that ``rank`` holds of a causally split
    sequence.

    ``x[:, :, zigzag_positions(...)]`` is the rank's part of x [B, H, S, D].

    Raises:
        ShapeError: ``sequence`` is not a multiple of 2·W. ArgumentError: no such rank.
    """
    if not 0 <= rank < world_size:
        raise ArgumentError("rank", rank, f"0 to {world_size - 1}")
    if sequence < 1 or sequence % (2 * world_size):
        raise ShapeError("sequence", sequence, f"a multiple of {2 * world_size}, twice the ranks")
    piece = sequence // (2 * world_size)
    first, last = rank * piece, (2 * world_size - 1 - rank) * piece
    return torch.cat([torch.arange(first, first + piece), torch.arange(last, last + piece)])


def zigzag_split(x: Tensor, world_size: int, rank: int, *, dim: int = 1) -> Tensor:
    """Return the part of x that ``rank`` holds of a causally split sequence: x with S / W instead of S
    positions in ``dim``, a copy; :func:`zigzag_positions` says which.

    Gradients flow to the rank's positions of x. ``dim``: of the positions, default that of [B, S, ...].

    Raises:
        ShapeError: S is not a multiple of 2·W. ArgumentError: no such rank.
    """
    return x.index_select(dim, zigzag_positions(x.shape[dim], world_size, rank).to(x.device))


def zigzag_merge(parts: Sequence[Tensor], *, dim: int = 1) -> Tensor:
    """Merge the ``parts`` of all ranks, in their order, into the whole sequence, a copy: it undoes
    :func:`zigzag_split`. It does not communicate; gather the parts first.

    Raises:
        ShapeError: there are no parts, or they are not alike, or have an odd number of positions.
    """
    if not parts:
        raise ShapeError("parts", "none", "one of each rank")
    for number, each in enumerate(parts):
        if each.shape != parts[0].shape:
            raise ShapeError(f"parts[{number}]", tuple(each.shape), f"{tuple(parts[0].shape)}")
    if parts[0].shape[dim] % 2:
        raise ShapeError("parts[0]", tuple(parts[0].shape), f"two halves in dimension {dim}")
    halves = [each.chunk(2, dim) for each in parts]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim)
