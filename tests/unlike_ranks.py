"""What rank processes run in worlds of unlike nodes, on CPUs and on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from in_world import relative

import mkernel
from mkernel.cases import case_of
from mkernel.conformance.ranks import Judge, judge_calls
from mkernel.errors import MkernelError
from mkernel.nn import ColumnParallelLinear, RowParallelLinear

SIZES = {
    "all_gather_gemm": {"m": 120, "n": 48, "k": 64},
    "gemm_reduce_scatter": {"m": 120, "n": 48, "k": 64},
    "gemm_all_reduce": {"m": 13, "n": 48, "k": 64},
    "all_reduce": {"m": 13, "n": 48},
}
"""Rows that neither chunks nor ranks divide, where that is legal."""


def case(op: str, chunk: int | None = 4, dtype: str = "float16", **fields: Any) -> Any:
    make: Any = case_of(op)
    return make(sizes=SIZES[op], dtype=dtype, out_dtype=dtype, chunk=chunk, **fields)


def wrong_results(other: str = "float32") -> list[str]:
    """Judge all ops, in half precision and in another dtype."""
    found = []
    for op in SIZES:
        found += judge_calls(case(op), 4)
        found += judge_calls(case(op, chunk=None, dtype=other), 2)
    found += judge_calls(case("all_gather_gemm", layout="column", options={"bias": True}), 2)
    found += judge_calls(case("gemm_all_reduce", options={"norm": "residual"}), 2)
    return found + unlike_shares() + unlike_rows() + layers() + repeated()


def unlike_shares() -> list[str]:
    """Give each node terms, or columns, of its own number."""
    world = mkernel.world()
    draw = torch.Generator().manual_seed(3)
    k, each = 384, world.identity.ranks_per_node
    a = torch.randn(8 * world.size, k, generator=draw).half()
    b = torch.randn(k, k, generator=draw).half()
    whole = a.double() @ b.double()
    a, b = (tensor.to(world.accelerator.device) for tensor in (a, b))
    found = []
    for shards in ("even", "speed", [k // each - 32, 32]):
        own = mkernel.shard(k, shards, multiple_of=16)
        rows = a.chunk(world.size)[world.rank]
        errors = {
            "scatter": relative(
                mkernel.gemm_reduce_scatter(a[:, own], b[own]).cpu(),
                whole.chunk(world.size)[world.rank],
            ),
            "reduce": relative(mkernel.gemm_all_reduce(a[:, own], b[own]).cpu(), whole),
            "gather": relative(mkernel.all_gather_gemm(rows, b[:, own]).cpu(), whole[:, own]),
        }
        found += [
            f"{name}, {shards}: off by {each}" for name, each in errors.items() if each > 1e-3
        ]
        ends = world.gather("test", [own.start, own.stop])
        told = [ends[rank] for rank in range(world.size)]
        if [one[0] for one in told] + [k] != [0] + [one[1] for one in told]:
            found.append(f"{shards}: parts {told} leave gaps")
    return found


def repeated() -> list[str]:
    """Call twice with the same inputs; parameters under no_grad are no gradients."""
    judge = Judge(case("gemm_all_reduce"))
    given = {name: torch.nn.Parameter(each) for name, each in judge.inputs(0).items()}
    with torch.no_grad():
        one, other = (mkernel.gemm_all_reduce(given["a"], given["b"]) for _ in range(2))
    return [] if torch.equal(one, other) else ["the same call has other bits"]


def refused() -> tuple[list[str], Any]:
    """Return what calls are told that such worlds do not take, and the calls that were counted."""
    half = torch.ones(4, 32, device=mkernel.world().accelerator.device).half()
    calls = {
        "dtype": lambda: mkernel.all_reduce(half.double()),
        "gradients": lambda: mkernel.all_gather_gemm(half.clone().requires_grad_(), half.t()),
        "of several": lambda: mkernel.all_gather_gemm(
            half.clone().requires_grad_(), [half.t()] * 2
        ),
        "experts": lambda: mkernel.moe_dispatch_gemm(half, torch.zeros(4, 1).int(), half[None]),
        "attention": lambda: mkernel.ring_attention(*[half.view(1, 2, 2, 32)] * 3),
        "memory": lambda: mkernel.empty((4,), half.dtype),
        "rows": lambda: mkernel.all_gather_gemm(half, half.t(), shards=[8, 8]),
        "nodes": lambda: mkernel.gemm_reduce_scatter(half, half.t(), shards=[1, 1, 2]),
        "speed": lambda: mkernel.all_gather_gemm(half, half.t(), shards="speed"),
        "word": lambda: mkernel.gemm_reduce_scatter(half, half.t(), shards="fast"),  # type: ignore[arg-type]
        "several": lambda: mkernel.all_gather_gemm(half, [half.t()] * 2, shards=[4, 4]),
        "gradient beside shards": lambda: mkernel.gemm_reduce_scatter(
            half.clone().requires_grad_(), half.t(), shards=[3, 1]
        ),
    }
    found = []
    for call in calls.values():
        with pytest.raises(MkernelError) as error:
            call()
        found.append(f"{type(error.value).__name__}: {error.value}")
    return found, mkernel.stats().calls


def judge_refusals(told: list[tuple[list[str], Any]], lacking: str) -> None:
    """AssertionError unless all ranks refused alike, by name, and called nothing. ``lacking``: the
    accelerator without float64."""
    found, calls = told[0]
    assert all(each == told[0] for each in told)
    assert calls == {}
    assert found[0].startswith("DtypeError: dtype = 'float64'")
    assert f"accelerator {lacking!r} lacks it" in found[0]
    assert found[1].startswith("Unsupported: all_gather_gemm has no gradients")
    assert found[2].startswith("Unsupported: all_gather_gemms has no gradients")
    assert "not 'moe_dispatch_gemm'" in found[3]
    assert "not 'ring_attention'" in found[4]
    assert "no symmetric memory" in found[5]
    assert "expected 8 along gather_dim=0, as shards=[8, 8] has it" in found[6]
    assert "expected 2 multiples of 1, one a node" in found[7]
    assert "mkernel.world().shares(M, 'speed')" in found[8]
    assert "'even', 'speed' or the size of a rank's part" in found[9]
    assert "one matrix, beside unequal shards" in found[10]
    assert "requires grad" in found[11]


def unlike_rows() -> list[str]:
    """Give each node rows of its own number, of matrices and of sequences in a batch; outputs are
    poisoned, inputs fresh."""
    world, found = mkernel.world(), []
    each, device = world.identity.ranks_per_node, world.accelerator.device

    def judge(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        error = relative(got.cpu(), wanted)
        if not error < 1e-3:
            found.append(f"{name}, call {seed}: off by {error}")

    for seed, parts in enumerate([(9, 2), (1, 30), (9, 2)]):
        draw = torch.Generator().manual_seed(seed)
        wide = torch.randn(3, each * sum(parts), 64, generator=draw).half()
        b = torch.randn(64, 48, generator=draw).half()
        own = world.part(parts)
        there = {name: x.to(device) for name, x in {"wide": wide, "a": wide[0], "b": b}.items()}
        truth, sums = wide.double() @ b.double(), world.size * (wide.double() @ b.double())
        out = torch.full((own.stop - own.start, 48), float("nan"), device=device).half()
        whole = torch.full((each * sum(parts), 64), float("nan"), device=device).half()
        c = mkernel.all_gather_gemm(
            there["a"][own], there["b"], chunk=4, shards=parts, gathered=whole
        )
        judge("gather", c, truth[0])
        judge("gathered", whole, wide[0].double())
        mkernel.gemm_reduce_scatter(there["a"], there["b"], chunk=4, shards=parts, out=out)
        judge("scatter", out, sums[0, own])
        batched = mkernel.all_gather_gemm(
            there["wide"][:, own], there["b"], gather_dim=1, shards=parts
        )
        judge("gather of a batch", batched, truth)
        for shards in (parts, "speed"):
            own = mkernel.shard(each * sum(parts), shards)
            batched = mkernel.gemm_reduce_scatter(
                there["wide"], there["b"], scatter_dim=1, shards=shards
            )
            judge(f"scatter of a batch, {shards}", batched, sums[:, own])
    return found


def layers() -> list[str]:
    """Cut two layers, which every rank has whole, into parts of its own number of features."""
    world, found = mkernel.world(), []
    each, device = world.identity.ranks_per_node, world.accelerator.device
    torch.manual_seed(5)  # the same layers on all ranks
    up, down = torch.nn.Linear(64, 384).half(), torch.nn.Linear(384, 48).half()
    x = torch.randn(8 * world.size, 64).half()
    with torch.no_grad():
        truth = (x.double() @ up.weight.double().t() + up.bias.double()).relu()
        truth = truth @ down.weight.double().t() + down.bias.double()
    up, down = up.to(device), down.to(device)
    for shards in ("speed", [384 // each - 32, 32], "even"):
        for split in (True, False):
            options = {"shards": shards, "sequence_parallel": split}
            column = ColumnParallelLinear.from_linear(up, **options)
            row = RowParallelLinear.from_linear(down, **options)
            given, wanted = x, truth
            if split:
                given, wanted = (t.chunk(world.size)[world.rank] for t in (x, truth))
            with torch.no_grad():
                y = row(column(given.to(device)).relu())
            width, error = column.weight.shape[0], relative(y.cpu(), wanted)
            if (
                error > 2e-3
                or width != row.weight.shape[1]
                or (width == 384 // world.size) != (shards == "even")
            ):
                found.append(f"layers, {shards}, {split}: {width} features, off by {error}")
    return found
