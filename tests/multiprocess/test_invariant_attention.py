"""Invariant attention on ``streams``: 1, 2 and 4 ranks, chunks and places of documents give a row the
same bits, which are right; and what is measured of tiles finds what depends on more."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import kept_ranks
import pytest
import torch
from torch import Tensor

import mkernel
from mkernel.backends.accelerators.streams import invariant_attention
from mkernel.cases import case_of
from mkernel.errors import DtypeError

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

SEQUENCE, CPU = 328, torch.device("cpu")
"""Positions: blocks of 128 keys, and tiles of 64 rows, are those of no rank of 2 or 4."""


class Draw(NamedTuple):
    """A call on whole tensors."""

    dtype: torch.dtype
    causal: bool
    heads: tuple[int, int]
    width: int
    documents: tuple[int, ...] | None = None
    scale: float | None = None
    lies: str = "heads"


DRAWS = (
    Draw(torch.bfloat16, True, (4, 2), 32),
    Draw(torch.bfloat16, False, (2, 2), 24, lies="positions"),
    Draw(torch.float16, True, (3, 1), 33, documents=(0, 5, 5, 150, SEQUENCE), scale=-0.3),
    Draw(torch.float32, True, (2, 1), 64),
    Draw(torch.float32, False, (2, 1), 16, documents=(0, 200, SEQUENCE)),
)


def tensors(draw: Draw) -> dict[str, Tensor]:
    """The whole tensors of a call, the same in every process."""
    chance = torch.Generator().manual_seed(3)
    heads, kv_heads = draw.heads
    return {
        name: torch.randn(2, count, SEQUENCE, draw.width, generator=chance).to(draw.dtype)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    }


def attended(chunk: int | None) -> list[tuple[Tensor, Tensor, Tensor]]:
    """This rank's positions, out and log-sum-exp of each call."""
    world, found = mkernel.world(), []
    for draw in DRAWS:
        case: Any = case_of("ring_attention")(
            {"sequence": SEQUENCE, "causal": draw.causal}, "float32", "float32"
        )
        at = case.positions(world.rank, world.size)
        given = [each[:, :, at].contiguous() for each in tensors(draw).values()]
        if draw.lies == "positions":
            given = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in given]
        bounds = None if draw.documents is None else torch.tensor(draw.documents).int()
        out, lse = mkernel.ring_attention(
            *given, causal=draw.causal, scale=draw.scale, cu_seqlens=bounds, chunk=chunk,
            return_lse=True, invariant=True,
        )  # fmt: skip
        found.append((at, out.clone(), lse.clone()))
    return found


def whole(world: int, chunk: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Out and log-sum-exp of each call in the order of positions."""
    ranks = kept_ranks.run(attended, chunk, ranks_per_node=world, accelerator="streams")
    found = []
    for parts in zip(*ranks, strict=True):
        order = torch.cat([at for at, _, _ in parts]).argsort()
        found.append(
            (
                torch.cat([out for _, out, _ in parts], 2)[:, :, order],
                torch.cat([lse for _, _, lse in parts], 2)[:, :, order],
            )
        )
    return found


def truth(draw: Draw) -> tuple[Tensor, Tensor]:
    q, k, v = (each.double() for each in tensors(draw).values())
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scale = draw.width**-0.5 if draw.scale is None else draw.scale
    seen = torch.zeros(SEQUENCE, SEQUENCE, dtype=torch.bool)
    for begin, end in pairwise(draw.documents or (0, SEQUENCE)):
        seen[begin:end, begin:end] = True
    if draw.causal:
        seen.tril_()
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~seen, float("-inf"))
    return scores.softmax(3) @ v, scores.logsumexp(3)


def test_ranks_and_chunks_change_no_bit_of_what_is_right() -> None:
    alone = whole(1)
    for draw, (out, lse) in zip(DRAWS, alone, strict=True):
        wanted, sums = truth(draw)
        error = (out.double() - wanted).norm() / wanted.norm()
        limits = case_of("ring_attention")({}, str(draw.dtype)[6:], "float32").tolerances()
        assert error < limits["out"], draw
        assert (lse.double() - sums).norm() / sums.norm() < limits["lse"], draw
    for world, chunk in ((2, None), (4, None), (4, 7)):
        for draw, one, other in zip(DRAWS, alone, whole(world, chunk), strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert torch.equal(mine, theirs), (world, chunk, draw)


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
