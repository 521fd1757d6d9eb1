"""Calls of attention on whole sequences, with invariant results, on ranks; and the truth of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import kept_ranks
import torch
from torch import Tensor

import mkernel
from mkernel.cases import case_of


class Draw(NamedTuple):
    """A call on whole tensors. ``apart``: scores differ widely, so that few keys count. ``ends``: how
    many positions of the sequence there are, if not all."""

    sequence: int
    dtype: torch.dtype
    causal: bool
    heads: tuple[int, int]
    width: int
    documents: tuple[int, ...] | None = None
    scale: float | None = None
    lies: str = "heads"
    apart: bool = False
    ends: int | None = None
    device: str = "cpu"


Result = tuple[Tensor, Tensor]
"""Out and the log-sum-exp."""


def tensors(draw: Draw) -> dict[str, Tensor]:
    """The whole tensors of a call, the same in every process."""
    chance = torch.Generator().manual_seed(3)
    heads, kv_heads = draw.heads
    found = {
        name: torch.randn(2, count, draw.sequence, draw.width, generator=chance)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    }
    if draw.apart:
        found["q"] *= 3
    return {name: each[:, :, : draw.ends].to(draw.dtype) for name, each in found.items()}


def attended(
    draws: Sequence[Draw], chunk: int | None, how: str = "", first: int = 0
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """This rank's positions, out and log-sum-exp of each call. ``how``: ``graph`` replays a call;
    ``ring`` plants that keys are taken in the order of ranks. ``first``: of the batch."""
    world, found = mkernel.world(), []
    for draw in draws:
        case: Any = case_of("ring_attention")(
            {"sequence": draw.ends or draw.sequence, "causal": draw.causal}, "float32", "float32"
        )
        at = case.positions(world.rank, world.size)
        given = [each[first:, :, at].to(draw.device) for each in tensors(draw).values()]
        if draw.lies == "positions":
            given = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in given]
        bounds = None if draw.documents is None else torch.tensor(draw.documents).int()

        def call(draw: Draw = draw, given: Any = given, bounds: Any = bounds) -> Result:
            made: Result = mkernel.ring_attention(
                *given, causal=draw.causal, scale=draw.scale, cu_seqlens=bounds, chunk=chunk,
                return_lse=True, invariant=True,
            )  # fmt: skip
            return made

        out, lse = _replayed(call) if how == "graph" else _planted(call) if how else call()
        mkernel.synchronize()
        found.append((at, out.cpu().clone(), lse.cpu().clone()))
    return found


def _replayed(call: Any) -> Result:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made: Result = call()
    for each in made:
        each.fill_(torch.nan)
    graph.replay()
    return made


def _planted(call: Any) -> Result:
    from mkernel.backends.accelerators.hopper.attention.kernel import AttentionKernelExecutor

    begin = AttentionKernelExecutor.__init__

    def by_rank(self: Any, *arguments: Any) -> None:
        begin(self, *arguments)
        self._ordered = False

    with mock.patch.object(AttentionKernelExecutor, "__init__", by_rank):
        made: Result = call()
    return made


def whole(draws: Sequence[Draw], chunk: int | None, *how: Any, **world: Any) -> list[Result]:
    """Out and log-sum-exp of each call in the order of positions, in a world of kept ranks."""
    ranks = kept_ranks.run(attended, draws, chunk, *how, **world)
    found = []
    for parts in zip(*ranks, strict=True):
        order = torch.cat([at for at, _, _ in parts]).argsort()
        out, lse = (torch.cat([part[which] for part in parts], 2)[:, :, order] for which in (1, 2))
        found.append((out, lse))
    return found


def wrong(draw: Draw, result: Result) -> list[str]:
    """Return what of a result is not the truth, in float64, within the op's limits."""
    q, k, v = (each.double() for each in tensors(draw).values())
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scale = draw.width**-0.5 if draw.scale is None else draw.scale
    seen = torch.zeros(draw.sequence, draw.sequence, dtype=torch.bool)
    for begin, end in pairwise(draw.documents or (0, draw.sequence)):
        seen[begin:end, begin:end] = True
    if draw.causal:
        seen.tril_()
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~seen, float("-inf"))
    limits = case_of("ring_attention")({}, str(draw.dtype)[6:], "float32").tolerances()
    truth = {"out": scores.softmax(3) @ v, "lse": scores.logsumexp(3)}
    return [
        f"{draw}: {name}"
        for (name, wanted), found in zip(truth.items(), result, strict=True)
        if not (found.double() - wanted).norm() / wanted.norm() < limits[name]
    ]


def differing(draws: Sequence[Draw], one: Sequence[Result], other: Sequence[Result]) -> list[str]:
    """The calls of which both have other bits."""
    return [
        f"{draw}: {name}"
        for draw, *both in zip(draws, one, other, strict=True)
        for name, mine, theirs in zip(("out", "lse"), *both, strict=True)
        if not torch.equal(mine, theirs)
    ]
