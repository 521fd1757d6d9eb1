"""Invariant results on ``streams``: any batch, order of rows, chunk, number of ranks and of nodes gives
a row the same bits, which are those of the tree as this file adds it up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import kept_ranks
import pytest
import torch
from rounded_tree import rounded, tree
from torch import Tensor

import mkernel
from mkernel import Invariant
from mkernel.errors import ArgumentError, PlanMismatch, Unsupported

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

M, N = 24, 16
WORLDS = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (1, 8)]
EPS = 0.5
Tensors = dict[str, Any]


class Draw(NamedTuple):
    """A call on whole tensors. ``exact``: every sum of a segment is exact in float32, in any order."""

    number: int
    op: str
    dtype: torch.dtype
    scales: str | None
    how: Invariant
    exact: bool
    bias: bool


KINDS = [
    (torch.bfloat16, None), (torch.float16, None), (torch.float32, None),
    (torch.float8_e4m3fn, "tensor"), (torch.float8_e4m3fn, "row"), (torch.float8_e4m3fn, "block"),
]  # fmt: skip
OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "norm", "all_reduce")


def draws() -> Iterator[Draw]:
    """Draw calls, of each op and kind of operands one."""
    chance = random.Random(61)
    for number, (op, kind) in enumerate((op, kind) for op in OPS for kind in KINDS):
        partial = chance.choice([None, "float32", "bfloat16"])
        yield Draw(number, op, *kind, Invariant(8, partial), number % 2 == 0, chance.random() < 0.5)


def tensors(draw: Draw) -> Tensors:
    """The whole tensors of a call, the same in every process."""
    chance = torch.Generator().manual_seed(draw.number)
    k = 1024 if draw.scales == "block" else 256
    exact = draw.exact

    def some(*sizes: int) -> Tensor:
        if exact:
            return torch.randint(-32, 33, sizes, generator=chance).float()
        return torch.randn(sizes, generator=chance)

    def scale(*sizes: int) -> Tensor:
        return torch.exp2(torch.randint(-2, 3, sizes, generator=chance).float())

    a, b = some(M, k).to(draw.dtype), some(N, k).to(draw.dtype).t()
    found: Tensors = {"a": a, "b": b}
    sizes = {
        "tensor": ((1, 1), (1, 1)),
        "row": ((M, 1), (N, 1)),
        "block": ((M, k // 128), (1, k // 128)),
    }
    if draw.scales is not None:
        of_a, of_b = sizes[draw.scales]
        found |= {"a_scale": scale(*of_a), "b_scale": scale(*of_b).t()}
    out = torch.bfloat16 if draw.scales else draw.dtype
    if draw.bias:
        found["bias"] = some(N).to(out)
    if draw.op == "norm":
        found |= {"residual": some(M, N).to(out), "norm_weight": some(N).to(out)}
    return found


def wide(given: Tensors) -> tuple[Tensor, Tensor]:
    """The operands times their scales."""
    found = []
    for name in "ab":
        x = given[name].float()
        if f"{name}_scale" in given:
            each = given[f"{name}_scale"]
            for dim in (0, 1):
                if each.shape[dim] not in (1, x.shape[dim]):
                    each = each.repeat_interleave(128, dim).narrow(dim, 0, x.shape[dim])
            x = x * each
        found.append(x)
    return found[0], found[1]


def partial_of(draw: Draw) -> torch.dtype:
    out = torch.bfloat16 if draw.scales else draw.dtype
    return getattr(torch, draw.how.partial_dtype) if draw.how.partial_dtype else out


def roots(draw: Draw, given: Tensors, parts: int) -> list[Tensor]:
    """The roots of so many subtrees, by exact products of segments."""
    a, b = (each.double() for each in wide(given))
    if draw.op == "all_gather_gemm":
        return [a @ b]
    dtype, step = partial_of(draw), len(b) // 8
    leaves = [
        rounded(a[:, at : at + step] @ b[at : at + step], dtype) for at in range(0, len(b), step)
    ]
    each = 8 // parts
    return [tree(leaves[at : at + each], dtype) for at in range(0, 8, each)]


def emulated(draw: Draw, given: Tensors) -> Tensor:
    """All rows of a call whose sums of segments are exact: every rounding that the op is allowed."""
    out = torch.bfloat16 if draw.scales else draw.dtype
    total = rounded(roots(draw, given, 1)[0], out)
    if "bias" in given and draw.op != "norm":
        total = rounded(total + given["bias"].double(), out)
    return total.to(out)


def called(draw: Draw, given: Tensors, rows: Tensor, chunk: int | None) -> Tensor:
    """One call on these rows, on this rank: the rows that it gets."""
    world = mkernel.world()
    a, b = given["a"][rows], given["b"]
    options: Tensors = {"chunk": chunk, "invariant": draw.how}
    scales = {name: given[name] for name in ("a_scale", "b_scale") if name in given}
    if draw.scales in ("row", "block"):
        scales["a_scale"] = scales["a_scale"][rows]

    def part(x: Tensor, dim: int) -> Tensor:
        return x.chunk(world.size, dim)[world.rank].contiguous()

    if draw.op == "all_gather_gemm":
        if draw.scales in ("row", "block"):
            scales["a_scale"] = part(scales["a_scale"], 0)
        b, bias = b[:, : N // world.size], given.get("bias")
        if draw.scales == "row":
            scales["b_scale"] = scales["b_scale"][:, : b.shape[1]]
        bias = None if bias is None else bias[: b.shape[1]]
        return mkernel.all_gather_gemm(part(a, 0), b, bias=bias, **scales, **options)
    if draw.op == "all_reduce":
        x = roots(draw, {**given, "a": a, **scales}, world.size)[world.rank].to(partial_of(draw))
        out = torch.bfloat16 if draw.scales else draw.dtype
        return mkernel.all_reduce(x, out_dtype=out, **options)
    a, b = part(a, 1), part(b.t(), 1).t()
    if draw.scales == "block":
        scales = {"a_scale": part(scales["a_scale"], 1), "b_scale": part(scales["b_scale"], 0)}
    if draw.op == "norm":
        norm = {
            "residual": given["residual"][rows],
            "norm_weight": given["norm_weight"],
            "eps": EPS,
        }
        normed, new = mkernel.gemm_all_reduce(
            a, b, bias=given.get("bias"), **norm, **scales, **options
        )
        return torch.cat((normed, new), 1)
    op: Any = getattr(mkernel, draw.op)
    return op(a, b, bias=given.get("bias"), **scales, **options)


def every_row(nodes: int, ranks: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    """For each draw the rows of some batches, drawn for this world alone, and what this rank got."""
    chance = random.Random(f"{nodes} x {ranks}")
    size, found = nodes * ranks, []
    for draw in draws():
        given = tensors(draw)
        order = torch.tensor(chance.sample(range(M), M))
        cut = size * chance.randrange(1, M // size) if size < M else M
        batches = [one for one in (order[:cut], order[cut:]) if len(one)]
        results = []
        for rows in batches:
            chunk = chance.choice([None, 1, 3])
            once, again = (called(draw, given, rows, chunk) for _ in range(2))
            assert torch.equal(once, again), f"{draw}: a known call"
            results.append(once)
        found.append((batches, results))
    return found


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.fixture(scope="module")
def alone() -> list[Tensor]:
    """All rows of every draw, in order, on one rank."""
    found = kept_ranks.run(every_row, 1, 1, ranks_per_node=1, accelerator="streams")[0]
    return [joined(*each) for each in found]


def joined(batches: list[Tensor], results: list[Tensor]) -> Tensor:
    whole = torch.cat(results)
    return whole[torch.argsort(torch.cat(batches))]


@pytest.mark.parametrize(("nodes", "ranks"), WORLDS[1:])
def test_a_row_has_the_same_bits_in_every_world_and_batch(
    nodes: int, ranks: int, alone: list[Tensor]
) -> None:
    every = kept_ranks.run(
        every_row, nodes, ranks, nodes=nodes, ranks_per_node=ranks, accelerator="streams"
    )
    for number, draw in enumerate(draws()):
        batches, own = every[0][number]
        results = own
        if draw.op == "gemm_reduce_scatter":
            results = [
                torch.cat(parts) for parts in zip(*(each[number][1] for each in every), strict=True)
            ]
        found, wanted = joined(batches, results), alone[number]
        assert torch.equal(bits(found), bits(wanted[:, : found.shape[1]])), draw


def test_the_bits_are_those_of_the_tree(alone: list[Tensor]) -> None:
    exact = 0
    for found, draw in zip(alone, draws(), strict=True):
        given = tensors(draw)
        if draw.op == "norm":
            continue
        if draw.exact or draw.op == "all_reduce":
            if "bias" in given and draw.op == "all_reduce":
                del given["bias"]
            assert torch.equal(bits(found), bits(emulated(draw, given))), draw
            exact += 1
        if draw.op in ("gemm_reduce_scatter", "gemm_all_reduce") and "bias" not in given:
            scales = {name: each for name, each in given.items() if name.endswith("_scale")}
            same = mkernel.invariant_mm(given["a"], given["b"], invariant=draw.how, **scales)
            assert torch.equal(bits(found), bits(same)), draw
    assert exact >= 12


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ArgumentError, Unsupported) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def refusals() -> list[str]:
    size = mkernel.world().size
    a, b, wide_b = torch.ones(size, 32), torch.ones(32, 8), torch.ones(32, 8).double()
    return [
        refused(lambda: mkernel.gemm_all_reduce(a, b, invariant=Invariant(8))),
        refused(lambda: mkernel.gemm_all_reduce(a, b, invariant=Invariant(1))),
        refused(lambda: mkernel.gemm_all_reduce(a.double(), wide_b, invariant=True)),
        refused(lambda: mkernel.all_gather_gemm(a, b, invariant="yes")),  # type: ignore[arg-type]
        refused(lambda: mkernel.all_gather_gemm(a[:, :5].contiguous(), b[:5], invariant=True)),
    ]


def test_refusals_name_what_is_legal() -> None:
    deep, few, double, text, gathered = kept_ranks.run(
        refusals, ranks_per_node=2, accelerator="streams"
    )[0]
    assert deep.startswith("ShapeError: k = 32")
    assert "a multiple of 64" in deep
    assert few.startswith("ArgumentError: segments = 1")
    assert "2 ranks divide" in few
    assert double.startswith("DtypeError: dtype = float64")
    assert text.startswith("ArgumentError: invariant = yes")
    assert gathered == "done"
    three = kept_ranks.run(refusals, ranks_per_node=3, accelerator="streams")[0]
    assert "a world of 1, 2, 4, ... ranks, not of 3" in three[0]


def world_level() -> list[str]:
    a, b = torch.randn(8, 128), torch.randn(128, 8)
    size = mkernel.world().size
    plan = mkernel.ops.gemm_all_reduce.OP.call(mkernel.ops.gemm.GemmCall(a, b)).plan
    assert plan.invariant == Invariant(4, "float32")
    assert plan.world_size == size
    x, ids = torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int64)
    sent = mkernel.moe_dispatch(x, ids, num_experts=size)
    weights = torch.ones(4, 1)
    return [
        refused(lambda: mkernel.moe_combine(sent.rows, sent.handle, weights)),
        refused(lambda: mkernel.gemm_all_reduce(a[:, :4], b[:4], invariant=False)),
    ]


def test_a_world_refuses_ops_that_promise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_INVARIANT", "1")
    monkeypatch.setenv("MKERNEL_INVARIANT_SEGMENTS", "4")
    combine, off = mkernel.launch(world_level, ranks_per_node=2, accelerator="ascend")[0]
    assert "does not promise invariant results of 'moe_combine'" in combine
    assert off == "done"


def differing() -> str:
    a, b = torch.ones(8, 256), torch.ones(256, 8)
    try:
        mkernel.gemm_all_reduce(a, b, invariant=Invariant(8 << mkernel.world().rank))
    except PlanMismatch as error:
        return str(error)
    return ""


def test_ranks_that_differ_are_told() -> None:
    for told in mkernel.launch(differing, ranks_per_node=2, accelerator="streams"):
        assert "invariant.segments" in told
