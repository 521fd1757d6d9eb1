"""Ring attention beside what the kit judges: wide heads and long pieces against float64,
bits, what is sent, and planted faults."""

from __future__ import annotations

from typing import Any

import pytest

from mkernel.backends.accelerators.ascend import _ascend
from mkernel.backends.accelerators.ascend.ring_attention import RingAttentionOp
from mkernel.backends.transport._transport import AbortCode
from mkernel.errors import ShapeError
from mkernel.plan.model import LaunchPlan

from .rig import (
    PATIENCE_S,
    World,
    planned,
    same_bits,
    scheduled,
)


def attention_plan(
    rows: int,
    head_dim: int = 64,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    causal: bool = False,
    chunk: int | None = None,
    dtype: str = "float16",
    **options: Any,
) -> LaunchPlan:
    """``rows``: positions of one rank. ``options``: as :func:`.rig.planned` takes them."""
    world = options.get("nodes", 1) * options.get("ranks_per_node", 1)
    made = planned(
        "ring_attention",
        {
            "batch": batch,
            "heads": heads,
            "kv_heads": kv_heads,
            "sequence": rows * world,
            "head_dim": head_dim,
            "causal": causal,
        },
        dtype=dtype,
        out_dtype=dtype,
        **{"comm_blocks": 4, **options},
    )
    return scheduled(made, rows_per_chunk=chunk or -(-rows // 3))


@pytest.mark.parametrize(
    ("rows", "head_dim", "chunk", "causal"),
    [
        (515, 200, 300, False),
        (514, 136, 257, True),
        (34, 256, 34, True),
        (33, 1024, 20, False),
    ],
)
def test_wide_heads(rows: int, head_dim: int, chunk: int, causal: bool) -> None:
    plan = attention_plan(rows, head_dim, causal=causal, chunk=chunk, nodes=2, ranks_per_node=2)
    with World(plan) as world:
        world.check(epochs=3)


def test_long_pieces() -> None:
    """Tiles of queries have two row blocks, the last one's second block a few rows."""
    with World(attention_plan(1174, 24, heads=1, chunk=400, ranks_per_node=2)) as world:
        world.check()


@pytest.mark.parametrize("causal", [False, True])
def test_bits_do_not_depend_on_cores(causal: bool) -> None:
    results = []
    options: list[tuple[dict[str, Any], int | None]] = [
        ({}, None),
        ({"comm_blocks": 1, "compute_blocks": 1}, 1),
        ({"comm_blocks": 48, "compute_blocks": 5}, 4),
        ({"comm_blocks": 30, "compute_blocks": 24}, 2),
    ]
    for chosen, slots in options:
        plan = attention_plan(390, causal=causal, chunk=65, ranks_per_node=4, **chosen)
        with World(plan, slots=slots) as world:
            results.append(world.call(world.tensors(seed=7)))
    assert same_bits(results)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strict_simulation_finds_nothing(dtype: str, causal: bool) -> None:
    """In any legal order of the instructions: no hazard, and the same bits."""
    results = []
    plan = attention_plan(
        330, 80, causal=causal, dtype=dtype, chunk=100, nodes=2, ranks_per_node=2, compute_blocks=2
    )
    for strict in (None, _ascend.Strict(), _ascend.Strict(seed=1), _ascend.Strict(seed=2)):
        with World(plan, strict=strict) as world:
            world.poison()
            results.append([out for e in range(3) for out in world.call(world.tensors(seed=e))])
    assert same_bits(results)


@pytest.mark.parametrize("causal", [False, True])
def test_invariant_results_are_right_in_any_legal_order(causal: bool) -> None:
    """Blocks of keys come in the order of positions, own ones among them; nothing is put by."""
    results = []
    for strict, cores in ((None, 24), (None, 5), (_ascend.Strict(seed=1), 2)):
        plan = attention_plan(
            256, 40, causal=causal, chunk=70, ranks_per_node=2, compute_blocks=cores, invariant=True
        )
        with World(plan, strict=strict) as world:
            world.check()
            results.append(world.call(world.tensors(seed=7)))
    assert same_bits(results)


def test_pieces_that_cut_blocks_of_invariant_results_are_refused() -> None:
    with pytest.raises(ShapeError, match="sequence = 384 is not legal; expected a multiple of 512"):
        RingAttentionOp().geometry(
            attention_plan(192, causal=True, ranks_per_node=2, invariant=True)
        )
    RingAttentionOp().geometry(attention_plan(200, invariant=True))


@pytest.mark.parametrize(("role", "wait"), [("vector", 0), ("cube", 0), ("cube", 1)])
def test_a_missing_wait_for_the_other_part_is_reported(role: Any, wait: int) -> None:
    """Vector cores wait for the cube core's first scores, it waits for the weights of both: reported by
    whichever of the two comes second."""
    plan = attention_plan(1100, 32, heads=1, compute_blocks=1)
    with World(plan, strict=_ascend.Strict(skip_role=role, skip_waits=[wait])) as world:
        world.epoch = 1
        launch = world.launch(0, world.tensors(seed=1)[0])
        wanted = "no signal orders the two cores; a TNOTIFY or a TWAIT is missing"
        with pytest.raises(RuntimeError, match=wanted):
            launch.wait(PATIENCE_S)


def test_what_nobody_sees_is_not_sent() -> None:
    """Causal: rank 0's last piece ends the sequence, and only rank 0 sees it."""
    plan = attention_plan(64, causal=True, chunk=32, nodes=4)
    with World(plan) as world:
        world.check()
        pairs = {(source, put.peer) for source, put in world.puts if put.nbytes}
        sent = {
            pair: sum(put.nbytes for source, put in world.puts if (source, put.peer) == pair)
            for pair in pairs
        }
    whole = 2 * 64 * 64 * 2
    assert sent == {
        (source, peer): whole if peer < source else whole // 2
        for source in range(4)
        for peer in range(4)
        if peer != source
    }


def test_waits_for_every_chunk() -> None:
    """With a chunk counted as arrived that is not, the result is wrong: the wait is what makes it
    right."""
    plan = attention_plan(96, ranks_per_node=2)
    geometry = RingAttentionOp().geometry(plan)
    with World(plan) as world:
        world.poison()
        tensors = world.tensors(seed=3)
        for chunk in range(geometry.chunks):
            world.add(1, geometry.arrived(0, chunk, epoch=1))
        world.alone(1, tensors[1])
        assert not world.errors(tensors)[1] <= 0.1


def test_a_rank_that_does_not_come_is_named() -> None:
    plan = attention_plan(96, ranks_per_node=2)
    with World(plan) as world:
        code, seen = world.alone(0, world.tensors(seed=1)[0])
        assert (code, seen.peer) == (AbortCode.timeout, 1)
        assert seen.signal == RingAttentionOp().geometry(plan).arrived(1, seen.chunk, epoch=1)


def test_heads_that_are_too_wide_are_refused() -> None:
    with pytest.raises(ShapeError, match="head_dim = 1032 is not legal; expected at most 1024"):
        RingAttentionOp().geometry(attention_plan(16, 1032))
