"""Attention by one kernel on one GPU: right in float64, to what rounding explains."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from device_buffers import needs_gpus

from mkernel.backends.accelerators.hopper.native import native

pytestmark = [needs_gpus(1)]

WIDTH = 128
BITS = {"bfloat16": 8, "float16": 11}
"""A weight, and the result, are each rounded by at most 2^-BITS of themselves."""
SMALLEST = {"bfloat16": 0.0, "float16": 2.0**-25}
"""What a weight is rounded by at most where it has fewer bits."""
DRAWS = 60


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    causal: bool = False
    dtype: str = "bfloat16"
    positions: bool = False  # [B, S, H, D] in memory
    scale: float = WIDTH**-0.5


@dataclass
class Tensors:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def drawn(chance: random.Random) -> Shape:
    groups, kv_heads = chance.choice([1, 2, 4]), chance.choice([1, 2, 3])
    queries, causal = chance.randint(1, 900), chance.random() < 0.5
    keys = queries if causal else chance.randint(1, 900)
    dtype = chance.choice(list(BITS))
    scale = chance.choice([WIDTH**-0.5, 0.5])
    return Shape(
        chance.randint(1, 2), groups * kv_heads, kv_heads, queries, keys, causal, dtype,
        chance.random() < 0.5, scale,
    )  # fmt: skip


def made(shape: Shape, seed: int) -> Tensors:
    """Random operands, results that are poisoned."""
    chance = torch.Generator("cuda").manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def rows(heads: int, count: int) -> torch.Tensor:
        sizes = (shape.batch, count, heads) if shape.positions else (shape.batch, heads, count)
        found = torch.randn(*sizes, WIDTH, generator=chance, device="cuda").to(dtype)
        return found.transpose(1, 2) if shape.positions else found

    q = rows(shape.heads, shape.queries)
    k, v = (rows(shape.kv_heads, shape.keys) for _ in "kv")
    lse = torch.full((shape.batch, shape.heads, shape.queries), torch.nan, device="cuda")
    return Tensors(q, k, v, torch.full_like(q, torch.nan), lse)


def attend(shape: Shape, tensors: Tensors, counters: torch.Tensor) -> None:
    core = native().Core(
        [
            (each.data_ptr(), each.stride()[:3])
            for each in (tensors.q, tensors.k, tensors.v, tensors.out)
        ],
        tensors.lse.data_ptr(),
        counters.data_ptr(),
        (shape.batch, shape.heads, shape.kv_heads, shape.queries, shape.keys),
        shape.scale,
        shape.causal,
        shape.dtype == "float16",
    )
    native().attend(0, core, torch.cuda.current_stream().cuda_stream)


def wrong(shape: Shape, tensors: Tensors) -> str:
    """What is beyond what rounding explains; empty: nothing."""
    groups = shape.heads // shape.kv_heads
    k, v = (each.double().repeat_interleave(groups, 1) for each in (tensors.k, tensors.v))
    scores = tensors.q.double() @ k.transpose(-1, -2) * shape.scale
    if shape.causal:
        behind = torch.ones(shape.queries, shape.keys, device="cuda", dtype=torch.bool).triu(1)
        scores.masked_fill_(behind, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    want, share = weights @ v, 2.0 ** -BITS[shape.dtype]
    allowed = share * (weights @ v.abs() + want.abs())
    largest = (scores.amax(-1) - lse).exp()[..., None]
    allowed += SMALLEST[shape.dtype] * (largest * v.abs().sum(-2, keepdim=True) + 1)
    # Scores are sums in float32 of 128 products, and so is what is subtracted from them.
    of_scores = 2.0**-21 * (tensors.q.double().abs() @ k.abs().transpose(-1, -2) * shape.scale)
    slack = of_scores.amax(-1)
    allowed += 2 * slack[..., None] * (weights @ v.abs())
    out = ((tensors.out.double() - want).abs() - allowed * 1.05).nan_to_num(nan=torch.inf)
    if bool((out > 1e-6).any()):
        return f"out of {shape}: {int((out > 1e-6).sum())} elements, by {float(out.max())}"
    error = ((tensors.lse.double() - lse).abs() - slack - 1e-5).nan_to_num(nan=torch.inf)
    if bool((error > 0).any()):
        return f"lse of {shape}: {int((error > 0).sum())} rows, by {float(error.max())}"
    return ""


@pytest.fixture
def counters() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, device="cuda")


def test_random_shapes(counters: torch.Tensor) -> None:
    chance = random.Random(24)
    for seed in range(DRAWS):
        shape = drawn(chance)
        tensors = made(shape, seed)
        attend(shape, tensors, counters)
        assert wrong(shape, tensors) == ""
        assert counters.tolist() == [0, 0]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", list(BITS))
def test_more_tiles_than_blocks(dtype: str, causal: bool, counters: torch.Tensor) -> None:
    shape = Shape(1, 8, 2, 128 * 33, 128 * 33, causal, dtype)
    tensors = made(shape, 1)
    attend(shape, tensors, counters)
    assert wrong(shape, tensors) == ""


@pytest.mark.parametrize("size", [0.0, 100.0], ids=["all equal", "extreme"])
def test_scores(size: float, counters: torch.Tensor) -> None:
    """Of the same weight, and of 10^4 up and down."""
    shape = Shape(1, 2, 2, 300, 300, causal=True)
    tensors = made(shape, 2)
    tensors.q *= size
    tensors.k *= 30
    attend(shape, tensors, counters)
    assert wrong(shape, tensors) == ""


def test_queries_that_are_nan_stay_alone(counters: torch.Tensor) -> None:
    shape = Shape(1, 2, 2, 300, 300)
    tensors = made(shape, 3)
    kept = tensors.q[:, :, 77].clone()
    tensors.q[:, :, 77] = torch.nan
    attend(shape, tensors, counters)
    assert bool(tensors.out[:, :, 77].isnan().all())
    tensors.q[:, :, 77], tensors.out[:, :, 77], tensors.lse[:, :, 77] = kept, 0, 0
    rest = torch.arange(300, device="cuda") != 77
    found = Tensors(
        tensors.q[:, :, rest],
        tensors.k,
        tensors.v,
        tensors.out[:, :, rest],
        tensors.lse[:, :, rest],
    )
    assert wrong(replace(shape, queries=299), found) == ""


def test_graphs_give_the_same_bits(counters: torch.Tensor) -> None:
    shape = Shape(1, 8, 4, 128 * 20, 128 * 20, causal=True)
    tensors = made(shape, 4)
    attend(shape, tensors, counters)
    first = tensors.out.clone(), tensors.lse.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(shape, tensors, counters)
        attend(shape, tensors, counters)
    for _ in range(20):
        tensors.out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(first[0], tensors.out)
        assert torch.equal(first[1], tensors.lse)


def test_that_the_judge_sees_faults(counters: torch.Tensor) -> None:
    """Another mask, another scale, a stale key, heads of keys that are exchanged, a row too few."""
    shape = Shape(1, 4, 2, 400, 400, causal=True)
    right = made(shape, 5)

    def seen(fault: str, given: Shape, tensors: Tensors) -> None:
        attend(given, tensors, counters)
        found = replace(right, out=tensors.out, lse=tensors.lse)
        assert wrong(shape, found) != "", fault

    fresh = {"out": torch.full_like(right.out, torch.nan)}
    seen("mask", replace(shape, causal=False), replace(right, **fresh))
    seen("scale", replace(shape, scale=shape.scale * 1.01), replace(right, **fresh))
    stale = right.k.clone()
    stale[:, 0, 17] = stale[:, 0, 18]
    seen("stale key", shape, replace(right, k=stale, **fresh))
    seen("heads", shape, replace(right, v=right.v.flip(1), **fresh))
    lse = torch.full_like(right.lse, torch.nan)
    seen("rows", replace(shape, queries=399, keys=399), replace(right, lse=lse, **fresh))


def test_what_it_does_not_take(counters: torch.Tensor) -> None:
    shape = Shape(1, 3, 2, 64, 64)
    with pytest.raises(ValueError, match="heads are a multiple"):
        attend(shape, made(shape, 6), counters)
    shape = Shape(1, 2, 2, 64, 128, causal=True)
    with pytest.raises(ValueError, match="as many as keys"):
        attend(shape, made(shape, 6), counters)
