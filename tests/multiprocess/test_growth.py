"""What a world keeps does not grow with the number of shapes that it has seen."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from random import Random
from typing import Any

import kept_ranks
import numpy as np
import pytest
import torch
from stranger import where
from torch.distributed import TCPStore

import mkernel
from mkernel.backends.transport import _transport
from mkernel.cases import Case, case_of
from mkernel.conformance.ranks import Judge, seconds_apart
from mkernel.plan.model import OpName
from mkernel.plan.two_generation_cache import TwoGenerationCache

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def keys_after(shapes: tuple[int, ...]) -> list[int]:
    """Keys of the store after so many calls, each of a shape of its own, and a barrier."""
    port, _ = where()
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    world, counted, rows = mkernel.world(), [], 0
    for count in shapes:
        for _ in range(count):
            rows += world.size
            mkernel.all_gather_gemm(torch.ones(rows // world.size, 16), torch.ones(16, 16))
        for _ in range(count):
            world.barrier()
        # No rank deletes anything any more once all have come to one barrier and left the one before.
        counted.append(store.num_keys())
        world.barrier()
    return counted


@pytest.mark.parametrize(("accelerator", "nodes"), [("streams", 1), ("ascend", 2)])
def test_the_store_forgets_what_every_rank_has_read(accelerator: str, nodes: int) -> None:
    options: dict[str, Any] = {"nodes": nodes, "ranks_per_node": 2 // nodes}
    for few, many in kept_ranks.run(keys_after, (5, 40), accelerator=accelerator, **options):
        assert many <= few + 4  # a rank may be about to delete what it told last


FEW = 8


def keep_few() -> list[TwoGenerationCache[Any, Any]]:
    """What a rank keeps of shapes; of so few from now on, so that it soon forgets some."""
    world = mkernel.world()
    recents: list[TwoGenerationCache[Any, Any]] = [
        world.planned, world._calls._agreement._agreed,
        world._membership.engine.heap._plans,
    ]  # fmt: skip
    for recent in recents:
        recent.most = FEW
    return recents


def kept_after(shapes: int) -> tuple[list[int], float]:
    """How much a rank keeps after calls of so many shapes, twice each, and the largest error."""
    world, recents = mkernel.world(), keep_few()
    wrong = 0.0
    for _ in range(2):
        for rows in range(1, shapes + 1):
            a = torch.full((world.size * rows, 16), float(rows))
            out = mkernel.gemm_all_reduce(a, torch.ones(16, 16))
            mkernel.synchronize()
            wrong = max(wrong, float((out - world.size * 16 * rows).abs().max()))
    return [recent.kept() for recent in recents], wrong


@pytest.mark.parametrize("name", ["queueing_backend:Queueing", "streams", "ascend"])
def test_a_world_keeps_the_last_shapes_only(name: str) -> None:
    """A shape that comes back is planned, agreed on and given its workspace again."""
    found = kept_ranks.run(kept_after, 5 * FEW, accelerator=name, ranks_per_node=2)
    assert found == [([*kept], 0.0) for kept, _ in found]
    for kept, _ in found:
        assert max(kept) <= 2 * FEW
        assert min(kept) >= FEW


# ---- memory and signals --------------------------------------------------------------------------

MOST = {"m": 96, "n": 24, "k": 16, "tokens": 24, "heads": 4, "head_dim": 6, "sequence": 40,
        "causal": 2}  # fmt: skip
"""The largest that a dimension is drawn; sizes are multiples of these."""


def drawn(op: OpName, size: Callable[[str], int]) -> Case:
    """A small problem of an op. ``size``: of a dimension."""
    sizes: dict[str, int] = {}
    if op == "moe_dispatch_gemm":
        sizes = {
            "tokens": size("tokens"),
            "hidden": 16,
            "features": 4 * size("n"),
            "experts": 4,
            "top_k": 2,
        }
    elif op == "ring_attention":
        sizes = {
            "batch": 1,
            "heads": size("heads"),
            "kv_heads": 1,
            "head_dim": 8 * size("head_dim"),
            "sequence": 4 * size("sequence"),
            "causal": size("causal") == 1,
        }
    else:
        sizes = {"m": 2 * size("m"), "n": 4 * size("n"), "k": 4 * size("k")}
    return case_of(op)(sizes=sizes, dtype="float32", out_dtype="float32")


def taken() -> tuple[int, int, int]:
    """How many symmetric buffers a rank holds, bytes of the newest that plans use, and how many words
    of its pad calls have used."""
    heap = mkernel.world()._membership.engine.heap
    assert heap._arena is not None
    words = (ctypes.c_uint64 * (1 << 20)).from_address(_transport.word_address(heap.pad, 0))
    return heap._regions, heap._arena.nbytes, int(np.flatnonzero(words)[-1]) + 1


def many_shapes(shapes: int) -> tuple[list[str], list[tuple[int, int, int]]]:
    """Judge calls of all ops, first of the largest shape of each and then of so many others, ranks
    apart by some milliseconds: what was wrong, and what was taken after half of them and after all."""
    ops: tuple[OpName, ...] = (
        "all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "moe_dispatch_gemm",
        "ring_attention",
    )  # fmt: skip
    keep_few()
    wrong, marks = [], []
    largest = [Judge(drawn(op, MOST.__getitem__)) for op in ops]
    for number, judge in enumerate((*largest, largest[0], *largest)):  # in even and in odd epochs
        wrong += judge(number)
    random = Random(5)  # the same on every rank
    plans = set()
    while len(plans) < shapes:
        op = random.choice((*ops, "ring_attention", "ring_attention", "ring_attention"))
        case = drawn(op, lambda name: random.randint(1, MOST[name]))
        if str(case) in plans:
            continue
        plans.add(str(case))
        seconds_apart(case, len(plans), 0.002)
        wrong += Judge(case)(len(plans))
        if len(plans) in (shapes // 2, shapes):
            marks.append(taken())
    return wrong, marks


@pytest.mark.parametrize("nic", [None, "efa"])
def test_any_number_of_shapes_shares_memory_and_signals(nic: str | None) -> None:
    """No plan has signals or memory of its own, whether it is known or forgotten."""
    way: dict[str, Any] = {"nodes": 2, "ranks_per_node": 1, "nic": nic, "verbs": "soft"}
    if nic is None:
        way = {"ranks_per_node": 2}
    found = kept_ranks.run(many_shapes, 20 * FEW, accelerator="ascend", **way)
    for wrong, (some, all_of_them) in found:
        assert not wrong
        assert all_of_them == some
