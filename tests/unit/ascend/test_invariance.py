"""Invariant results: any rows, chunk, number of ranks and of nodes give a row the same bits, which are
the tree's. The kit judges the same through the ops; here are more worlds, and faults."""

from __future__ import annotations

import random

import devices
import pytest
import torch
from plan_walk import WalkedWorld
from torch import Tensor

from mkernel import Invariant
from mkernel.backends.accelerators.ascend import AscendAccelerator
from mkernel.backends.accelerators.ascend.schedule import DispatchSchedule, ProductSchedule
from mkernel.backends.accelerators.ascend.timeline import model
from mkernel.backends.contracts.tree import tree_sum
from mkernel.conformance.checks.bits import same_bits, telling_leaves
from mkernel.errors import ArgumentError, ShapeError
from mkernel.plan.arguments import Around
from mkernel.plan.model import LaunchPlan, OpName
from mkernel.plan.pipeline import Chunking
from mkernel.plan.planner import plan as plan_of
from mkernel.topology.reshape import split_into_nodes

from .rig import A3, PATIENCE_S, World, scheduled, traces

SUMS: tuple[OpName, ...] = ("gemm_reduce_scatter", "gemm_all_reduce")
OPS: tuple[OpName, ...] = ("all_gather_gemm", *SUMS)
SEGMENTS, OF_SEGMENT, N = 8, 96, 72
K = SEGMENTS * OF_SEGMENT
LARGE = 2.0**14
HOW = Invariant(SEGMENTS, "float16")
MACHINE = devices.world(devices.node())
WORLDS = ((1, 1), (1, 2), (2, 2), (1, 4), (1, 8))


def planned(
    op: OpName,
    world: tuple[int, int],
    m: int,
    chunk: int | None = None,
    how: Invariant | None = HOW,
    k: int = K,
    n: int = N,
) -> LaunchPlan:
    ranks = world[0] * world[1]
    sizes = {"m": m, "n": n, "k": k if op == "all_gather_gemm" else k // ranks}
    return planned_of(op, world, sizes, chunk, how)


def planned_of(
    op: OpName,
    world: tuple[int, int],
    sizes: dict[str, int],
    chunk: int | None,
    how: Invariant | None = HOW,
) -> LaunchPlan:
    accelerator, (nodes, ranks) = AscendAccelerator(), world
    map_ = split_into_nodes(MACHINE, nodes, ranks, devices.SIM, devices.SOFT)
    where = WalkedWorld(accelerator, map_, ranks)
    far = nodes > 1
    return plan_of(
        op, sizes, dtype="float16", out_dtype="float32", around=Around(invariant=how),
        world=where.map, accelerator="ascend", capabilities=where.claims,
        nic="cx7" if far else None, verbs="soft" if far else None, chunk=chunk,
        schedule=accelerator.schedule,
    )  # fmt: skip


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """A and B, of whose first rows the segments' products are the leaves, which come third."""
    chance = torch.Generator().manual_seed(61)
    leaves, _ = telling_leaves(SEGMENTS)
    a, b = (torch.randn(size, generator=chance) for size in ((88, K), (K, N)))
    firsts = torch.arange(0, K, OF_SEGMENT)
    a[: len(leaves)] = 0.0
    large = leaves.abs() == LARGE
    a[: len(leaves), firsts] = torch.where(large, leaves / LARGE**0.5, 0.0)
    a[: len(leaves), firsts + 1] = torch.where(large, 0.0, 1.0)
    b[firsts], b[firsts + 1] = LARGE**0.5, 1.0
    return a.half(), b.half(), leaves.half()


def result(plan: LaunchPlan, a: Tensor, b: Tensor, turned: int = 0) -> Tensor:
    """Run a call on whole tensors. ``turned``: ranks have the parts of K of so many ranks further."""
    ranks = plan.world_size
    with World(plan) as world:
        world.poison()
        tensors = world.tensors(seed=1)
        for rank, own in enumerate(tensors):
            at = (rank + turned) % ranks
            if plan.op == "all_gather_gemm":
                own["a"].copy_(a.chunk(ranks)[rank])
                own["b"].copy_(b)
            else:
                own["a"].copy_(a.chunk(ranks, 1)[at])
                own["b"].copy_(b.chunk(ranks)[at])
        found = world.call(tensors)
        if plan.op == "gemm_reduce_scatter":
            return torch.cat(found)
        assert all(same_bits(found[0], other) for other in found)
        return found[0]


@pytest.mark.parametrize("op", OPS)
def test_bits_of_a_row_depend_on_nothing_else(op: OpName) -> None:
    a, b, leaves = operands()
    first = result(planned(op, (1, 1), len(a)), a, b)
    if op in SUMS:
        tree = tree_sum(list(leaves.t())).float()
        assert same_bits(first[: len(leaves)], tree[:, None].expand(-1, N))
    chance = random.Random(61)
    for world in WORLDS:
        for chunk in (None, chance.randint(1, 3)):
            rows = torch.tensor(
                [chance.randrange(len(a)) for _ in range(8 * chance.randint(1, 20))]
            )
            found = result(planned(op, world, len(rows), chunk), a[rows], b)
            assert same_bits(first[rows], found), (world, chunk, len(rows))


EXPERTS = {"hidden": 2 * OF_SEGMENT, "features": N, "experts": 8, "top_k": 3}


def rows_of_experts(
    world: tuple[int, int], chunk: int | None, x: Tensor, ids: Tensor, w: Tensor
) -> Tensor:
    """Dispatch whole tensors; return the rows of all places, [T * W, k, N]."""
    size = world[0] * world[1]
    sizes = {**EXPERTS, "tokens": len(x) // size}
    plan = planned_of("moe_dispatch_gemm", world, sizes, chunk)
    words = AscendAccelerator().routing_words(size, sizes["tokens"], ids.shape[1], len(w)) + 1
    with World(plan) as at:
        at.poison()
        at.epoch = 1
        parts = [each.chunk(size) for each in (x, ids, w)]
        launches = [
            at.launch(
                rank,
                dict(zip(("x", "topk_ids", "w"), own, strict=True))
                | {"routing": torch.empty(words, dtype=torch.int32)},
            )
            for rank, own in enumerate(zip(*parts, strict=True))
        ]
        assert all(launch.wait(PATIENCE_S) for launch in launches)
        by_expert = torch.cat([launch.results()["outputs"] for launch in launches])
    found = torch.empty_like(by_expert)
    found[ids.flatten().argsort(stable=True)] = by_expert
    return found.view(*ids.shape, -1)


def test_rows_of_experts_depend_on_nothing_else() -> None:
    random_of, chance = torch.Generator().manual_seed(61), random.Random(61)
    x, w = (
        torch.randn(sizes, generator=random_of).half()
        for sizes in ((88, EXPERTS["hidden"]), (8, EXPERTS["hidden"], N))
    )
    ids = torch.rand(88, 8, generator=random_of).argsort(1)[:, :3].contiguous()
    first = rows_of_experts((1, 1), None, x, ids, w)
    for world in WORLDS:
        for chunk in (None, chance.randint(1, 3)):
            rows = [chance.randrange(len(x)) for _ in range(8 * chance.randint(1, 20))]
            found = rows_of_experts(world, chunk, x[rows], ids[rows], w)
            assert same_bits(first[rows], found), (world, chunk, len(rows))
    plan = planned_of("moe_dispatch_gemm", (1, 2), {**EXPERTS, "tokens": 8}, None)
    cut = plan.part(DispatchSchedule).tiling
    other = scheduled(plan, tiling=cut.model_copy(update={"step_k": cut.step_k // 2}))
    with pytest.raises(ArgumentError, match=r"plan\.schedule .*invariant"):
        AscendAccelerator().workspace(other)


@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("segments", [1, 2, 16])
def test_other_segments_are_other_sums(op: OpName, segments: int) -> None:
    """As many as there are ranks are the cheap form; one is rounded as a leaf, even to fewer bits."""
    a, b, _ = operands()
    how = Invariant(segments, "float16")
    first = result(planned(op, (1, 1), len(a), how=how), a, b)
    assert not same_bits(first, result(planned(op, (1, 1), len(a)), a, b))
    assert torch.equal(first, first.half().float())
    if segments > 1:
        assert same_bits(first, result(planned(op, (1, 2), len(a), how=how), a, b))


@pytest.mark.parametrize("op", SUMS)
def test_planted_faults_are_seen(op: OpName) -> None:
    """A tree that is turned by rank, K cut by ranks alone, and sums in rank order."""
    a, b, _ = operands()
    first = result(planned(op, (1, 4), len(a)), a, b)
    for fault in (
        result(planned(op, (1, 4), len(a)), a, b, turned=1),
        result(planned(op, (1, 4), len(a), how=Invariant(4, "float16")), a, b),
        result(planned(op, (1, 4), len(a), how=None), a, b),
    ):
        assert not same_bits(fault, first)


@pytest.mark.parametrize("op", OPS)
def test_plans_with_other_steps_or_roundings_are_refused(
    op: OpName, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, accelerator = planned(op, (1, 2), 96), AscendAccelerator()
    accelerator.workspace(plan)
    chunking = plan.part(ProductSchedule).chunking
    halved = Chunking(**chunking.model_dump() | {"step_k": chunking.step_k // 2})
    faults = [scheduled(plan, chunking=halved)]
    if op in SUMS:
        faults.append(scheduled(plan, partial_dtype="float32"))
        with pytest.raises(ShapeError, match="multiple of 64"):
            planned(op, (1, 2), 96, k=K + 32)
    for fault in faults:
        with pytest.raises(ArgumentError, match=r"plan\.schedule .*(invariant|Invariant)"):
            accelerator.workspace(fault)
    monkeypatch.setenv("MKERNEL_ASCEND_TILE_K", "32")
    with pytest.raises(ArgumentError, match=r"MKERNEL_ASCEND_TILE_K = 32 .*invariant"):
        planned(op, (1, 2), 96)


@pytest.mark.parametrize("op", SUMS)
def test_k_steps_are_the_same_for_any_rows_and_ranks(op: OpName) -> None:
    cuts = {
        (part.chunking.tile_k, part.chunking.step_k)
        for world in WORLDS
        for m in (16, 4096)
        for part in [planned(op, world, m, k=4096).part(ProductSchedule)]
    }
    assert len(cuts) == 1


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("op", SUMS)
def test_calls_take_what_their_plan_predicts(op: OpName, ranks: int) -> None:
    """The leaves that are stored, read and added are in it."""
    sizes = {"m": 2048, "n": 2048, "k": 2048 * ranks}
    plan = planned(op, (1, ranks), how=Invariant(8, "float16"), **sizes)
    assert plan.prediction is not None
    replayed = model(traces(plan), A3, tracks=False).total_us
    assert abs(plan.prediction.pipelined_us / replayed - 1) <= 0.15
    usual = planned(op, (1, ranks), how=None, **sizes)
    if ranks == 1:
        assert usual.prediction is not None
        assert plan.prediction.pipelined_us > 1.2 * usual.prediction.pipelined_us
