"""Invariant attention on ``streams``: 1, 2 and 4 ranks, chunks and places of documents give a row the
same bits, which are right; and what is measured of tiles finds what depends on more."""

from __future__ import annotations

import kept_ranks
import pytest
import torch
from invariant_attention_ranks import Draw, differing, tensors, whole, wrong
from torch import Tensor

import mkernel
from mkernel.backends.accelerators.streams import invariant_attention
from mkernel.errors import DtypeError

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

SEQUENCE, CPU = 328, torch.device("cpu")
"""Positions: blocks of 128 keys, and tiles of 64 rows, are those of no rank of 2 or 4."""


DRAWS = (
    Draw(SEQUENCE, torch.bfloat16, True, (4, 2), 32),
    Draw(SEQUENCE, torch.bfloat16, False, (2, 2), 24, lies="positions"),
    Draw(SEQUENCE, torch.float16, True, (3, 1), 33, documents=(0, 5, 5, 150, SEQUENCE), scale=-0.3),
    Draw(SEQUENCE, torch.float32, True, (2, 1), 64),
    Draw(SEQUENCE, torch.float32, False, (2, 1), 16, documents=(0, 200, SEQUENCE)),
)


def test_ranks_and_chunks_change_no_bit_of_what_is_right() -> None:
    alone = whole(DRAWS, None, ranks_per_node=1, accelerator="streams")
    assert not [
        each for draw, found in zip(DRAWS, alone, strict=True) for each in wrong(draw, found)
    ]
    for world, chunk in ((2, None), (4, None), (4, 7)):
        found = whole(DRAWS, chunk, ranks_per_node=world, accelerator="streams")
        assert not differing(DRAWS, found, alone), (world, chunk)


def of_worlds() -> tuple[bool, str]:
    """Whether a document has the same bits anywhere in a sequence, with gradients; and a refusal."""
    given = [each.requires_grad_() for each in tensors(DRAWS[0]).values()]
    layer = mkernel.nn.RingAttention(causal=True, invariant=True)
    found = []
    for moved in (0, 100):
        q, k, v = (each.roll(-moved, 2).transpose(1, 2) for each in given)
        bounds = torch.tensor([0, 100 - moved or SEQUENCE - 100, SEQUENCE], dtype=torch.int32)
        y = layer(q, k, v, bounds)
        y.sum().backward()
        found.append(y.detach().roll(moved, 1)[:, 100:])
    try:
        mkernel.ring_attention(*(each.double() for each in given), invariant=True)
    except DtypeError as error:
        return torch.equal(*found), str(error)
    return torch.equal(*found), ""


def test_a_document_has_the_same_bits_anywhere_and_float64_is_refused() -> None:
    ((same, refused),) = kept_ranks.run(of_worlds, ranks_per_node=1, accelerator="streams")
    assert same
    assert "at most float32, with invariant results" in refused


def turned(q: Tensor, last: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A tile whose later rows see the blocks of keys in another order, where they see most."""
    out, lse = invariant_attention.tile(q, last, k, v)
    half = len(k) // 2
    other = invariant_attention.tile(q, last, k.roll(half, 0), v.roll(half, 0))
    late = (torch.arange(len(q)) > 40) & (last > half)
    return torch.where(late[:, None], other[0], out), torch.where(late, other[1], lse)


def beside(q: Tensor, last: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A tile whose rows share what they add."""
    out, lse = invariant_attention.tile(q, last, k, v)
    return out + 0 * q.sum(), lse


def touching(q: Tensor, last: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A tile whose rows take values times 0 that only others see."""
    out, lse = invariant_attention.tile(q, last, k, v)
    return out + 0 * v[: int(last.max()) + 1].sum(0), lse


def test_what_depends_on_more_than_a_row_is_found() -> None:
    """Also another number of rows in a product, as a library chooses it."""
    find = invariant_attention.first_difference
    for width in (16, 64, 128):
        assert find(invariant_attention.tile, CPU, width) is None
    assert find(turned, CPU, 64) == "in another place"
    assert find(beside, CPU, 64) == "beside rows of inf"
    assert find(touching, CPU, 64) == "beside rows of 0.0"
