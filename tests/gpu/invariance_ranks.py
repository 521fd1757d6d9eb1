"""Calls whose results are invariant, on a rank, for ``test_invariance_on_gpus``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import torch
from capture_ranks import captures, multiply
from torch import Tensor

import mkernel
from mkernel import Invariant
from mkernel.backends.accelerators.hopper.gemm import segments, tuning
from mkernel.backends.contracts.tree import tree_sum

ROWS, COLUMNS, K, SEGMENTS = 704, 1536, 2048, 8
E4M3 = torch.float8_e4m3fn


class Draw(NamedTuple):
    """A call on whole tensors. ``exact``: every sum of a segment is exact in float32, in any order;
    else terms cancel. ``column``: B is column-major. ``fast``: of e4m3, with fewer bits."""

    op: str
    dtype: torch.dtype = torch.bfloat16
    segments: int = SEGMENTS
    exact: bool = False
    bias: bool = False
    normed: bool = False
    column: bool = False
    scales: str | None = None
    fast: bool = False

    @property
    def out(self) -> torch.dtype:
        """The dtype of results."""
        return torch.bfloat16 if self.dtype == E4M3 else self.dtype


def given(draw: Draw, device: str = "cuda") -> dict[str, Tensor]:
    """The whole tensors of a call, the same on every rank."""
    chance = torch.Generator().manual_seed(len(draw.op) + 2 * draw.exact)

    def some(*sizes: int, sign: int = 1) -> Tensor:
        if draw.exact:
            most = 32 if draw.dtype == torch.bfloat16 else 8  # float16 would not hold the sums
            return torch.randint(-most, most + 1, sizes, generator=chance).float()
        found = torch.randn(sizes, generator=chance)
        found *= torch.exp2(torch.randint(-4, 3, sizes, generator=chance).float())
        half = sizes[1] // 2  # the second half nearly cancels the first
        found[:, half:] = sign * found[:, :half]
        found[:, -64:] = torch.randn(sizes[0], 64, generator=chance) / 16
        return found

    b = some(COLUMNS, K).to(draw.dtype).to(device)
    found = {"a": some(ROWS, K, sign=-1).to(draw.dtype).to(device)}
    found["b"] = b.t() if draw.column or draw.dtype == E4M3 else b.t().contiguous()
    if draw.scales is not None:
        rows, columns = (ROWS, COLUMNS) if draw.scales == "row" else (1, 1)
        powers = (torch.randint(-2, 3, (each,), generator=chance) for each in (rows, columns))
        of_a, of_b = (torch.exp2(each.float()).to(device) for each in powers)
        found |= {"a_scale": of_a[:, None], "b_scale": of_b[None]}
    if draw.bias:
        found["bias"] = torch.randn(COLUMNS, generator=chance).to(draw.out).to(device)
    if draw.normed:
        for name, sizes in (("residual", (ROWS, COLUMNS)), ("norm_weight", (COLUMNS,))):
            found[name] = torch.randn(sizes, generator=chance).to(draw.out).to(device)
    return found


def part(x: Tensor, dim: int) -> Tensor:
    """This rank's share."""
    world = mkernel.world()
    return x.chunk(world.size, dim)[world.rank]


def called(draw: Draw, whole: dict[str, Tensor], rows: Tensor) -> Tensor:
    """One call on these rows: what this rank gets of them."""
    a, b = whole["a"][rows], whole["b"]
    options: dict[str, Any] = {"invariant": Invariant(draw.segments)}
    if draw.op == "all_reduce":
        leaves = [leaf[rows] for leaf in leaves_of(draw, whole)]
        each = len(leaves) // mkernel.world().size
        options |= norm_of(draw, whole, rows)
        own = tree_sum(leaves[mkernel.world().rank * each :][:each])
        return joined(mkernel.all_reduce(own, **options))
    if draw.scales is not None:
        of_a = whole["a_scale"][rows] if draw.scales == "row" else whole["a_scale"]
        options |= {"a_scale": of_a, "b_scale": whole["b_scale"], "use_fast_accum": draw.fast}
    if draw.op == "all_gather_gemm":
        of_columns = {name: part(whole[name], -1) for name in ("bias",) if name in whole}
        if draw.scales == "row":
            options |= {"a_scale": part(of_a, 0), "b_scale": part(whole["b_scale"], 1)}
        own = part(b, 1)
        own = own if own.stride(0) == 1 else own.contiguous()
        return mkernel.all_gather_gemm(part(a, 0), own, **of_columns, **options)
    own = part(b, 0)
    if own.stride(0) == 1:
        own = own.t().contiguous().t()
    options |= {"bias": whole.get("bias")} | norm_of(draw, whole, rows)
    op: Any = getattr(mkernel, draw.op)
    return joined(op(part(a, 1).contiguous(), own, **options))


def norm_of(draw: Draw, whole: dict[str, Tensor], rows: Tensor) -> dict[str, Any]:
    """The arguments of a norm."""
    if not draw.normed:
        return {}
    return {"residual": whole["residual"][rows], "norm_weight": whole["norm_weight"], "eps": 0.5}


def joined(found: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Results and the new residual as one tensor."""
    return torch.cat(found, 1) if isinstance(found, tuple) else found


def leaves_of(draw: Draw, whole: dict[str, Tensor]) -> list[Tensor]:
    """The leaves of all ranks and rows, by a product that is the same in every call."""
    a, b = whole["a"].double(), whole["b"].double()
    if draw.scales is not None:
        a, b = a * whole["a_scale"].double(), b * whole["b_scale"].double()
    step = K // draw.segments
    cuts = range(0, K, step)
    return [(a[:, at : at + step] @ b[at : at + step]).float().to(draw.out) for at in cuts]


def every_batch(
    draws: Sequence[Draw], batches: Sequence[Sequence[int]], replays: bool = False
) -> list[list[Tensor]]:
    """Return what this rank gets for each draw of each batch of rows; ``replays``: by graphs."""
    multiply()
    found = []
    for draw in draws:
        whole = given(draw)
        results = []
        for batch in batches:
            rows = torch.tensor(batch, device="cuda")
            if not replays:
                results.append(called(draw, whole, rows).cpu())
                continue
            kept: list[Tensor] = []
            called(draw, whole, rows)
            graph = captures(lambda: kept.append(called(draw, whole, rows)))  # noqa: B023
            kept[0].fill_(torch.nan)
            graph.replay()
            results.append(kept[0].cpu())
        found.append(results)
    mkernel.synchronize()
    return found


def many_rows(draw: Draw, rows: int) -> Tensor:
    """The first and the last of so many rows, which repeat a draw's."""
    which = torch.arange(rows, device="cuda") % ROWS
    found = called(draw, given(draw), which)
    mkernel.synchronize()
    return torch.stack((found[0], found[-1])).cpu()


def adding(tiling: str, levels: int) -> AbstractContextManager[Any]:
    """Products of segments have this tiling, and add so many levels of the tree in registers."""
    return mock.patch.object(tuning, "_tree", return_value=(tiling, levels))


def in_registers(
    draws: Sequence[Draw], batches: Sequence[Sequence[int]], tiling: str, levels: int
) -> list[list[Tensor]]:
    """As :func:`every_batch`, with products :func:`adding` so many levels."""
    with adding(tiling, levels):
        return every_batch(draws, batches)


def planted(draw: Draw, batches: Sequence[Sequence[int]], fault: str) -> list[list[Tensor]]:
    """As :func:`every_batch`, with a fault: ``cut``, segments that depend on M; ``tree``, one turned by
    rank; ``order``, leaves added from the last one on; ``registers``, those of a tile added from
    another one on. Of the others no leaf is added in registers."""
    honest = segments._segments

    def cut(plan: Any) -> Any:
        found = honest(plan)
        return found if plan.gemm.m > len(batches[0]) else ((found[0][0], found[-1][1]),)

    add = segments.SegmentsExecutor._add

    def turned(self: Any, call: Any, terms: Any, *more: Any) -> None:
        by = call.rank % len(terms)
        add(self, call, [*terms[by:], *terms[:by]], *more)

    def backwards(self: Any, call: Any, terms: Any, *more: Any) -> None:
        some = terms if self._plan.gemm.m > len(batches[0]) else [*terms[1:], terms[0]]
        add(self, call, some, *more)

    multiply = segments.SegmentsExecutor._multiply

    def rolled(self: Any, call: Any, operands: Any, *more: Any) -> None:
        if self._plan.gemm.m <= len(batches[0]):
            by = honest(self._plan)[0][1]
            a, b = operands.a.roll(-by, 1), operands.b.roll(-by, 0)
            operands = operands._replace(a=a, b=b)
        multiply(self, call, operands, *more)

    patches = {
        "cut": mock.patch.object(segments, "_segments", cut),
        "tree": mock.patch.object(segments.SegmentsExecutor, "_add", turned),
        "order": mock.patch.object(segments.SegmentsExecutor, "_add", backwards),
        "registers": mock.patch.object(segments.SegmentsExecutor, "_multiply", rolled),
    }
    with adding("narrow", 2 if fault == "registers" else 0), patches[fault]:
        return every_batch([draw], batches)
