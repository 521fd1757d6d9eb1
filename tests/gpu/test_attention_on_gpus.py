"""Ring attention on `hopper`: right in float64, in any timing, order and graph; faults are seen."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import attention_ranks
import kept_ranks
import pytest
from attention_ranks import FAULTS, FAULTS_IN_PIECES, GRADIENT_FAULTS, Attention, drawn
from device_buffers import needs_gpus, takes_ranks
from in_world import TOLD_S
from kept_ranks import none_failed
from survivors import judge_absence, judge_survivors

import mkernel
from mkernel.backends.accelerators.hopper import capabilities
from mkernel.errors import ShapeError

pytestmark = [needs_gpus(1), pytest.mark.usefixtures("leaves_nothing")]

worlds = pytest.mark.parametrize(
    "world", [1, pytest.param(2, marks=takes_ranks(2)), pytest.param(4, marks=takes_ranks(4))]
)
several = pytest.mark.parametrize(
    "world", [pytest.param(2, marks=takes_ranks(2)), pytest.param(4, marks=takes_ranks(4))]
)
both = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def claimed(what: str) -> Any:
    return pytest.mark.skipif(
        not capabilities.claimed(what),
        reason=f"hopper does not claim {what!r} (capabilities.py: UNCLAIMED)",
    )


gradients = claimed("ring_attention_backward")
pieces = claimed("pieces")
packs = claimed("documents")
DRAWS = 200
GRADIENT_DRAWS = {1: 104, 2: 48, 4: 48}
"""By world; half as many shapes, each with two scales: the library takes 0.15 s for each new shape of a
call, of which a draw has up to five."""
MIXED = [
    Attention(1, 4, 4, 256, causal=True),
    Attention(2, 4, 1, 128, width=64, lies="positions"),
    Attention(1, 8, 2, 512, causal=True, dtype="float16", lies="positions"),
    Attention(2, 2, 2, 64, dtype="float16"),
]


def launched(world: int, fn: Any, *arguments: Any, accelerator: str = "hopper") -> list[Any]:
    return mkernel.launch(
        fn, *arguments, ranks_per_node=world, accelerator=accelerator, timeout_s=TOLD_S
    )


def right(world: int, fn: Any, *arguments: Any, run: Any = kept_ranks.run) -> None:
    """No rank found a failure."""
    found = run(fn, *arguments, ranks_per_node=world, accelerator="hopper", timeout_s=TOLD_S)
    none_failed(found)


@worlds
def test_random_shapes(world: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    print(f"seed {seed}")
    right(world, attention_ranks.judged, [drawn(chance) for _ in range(DRAWS)], seed)


@worlds
@both
def test_every_way_tensors_lie(world: int, causal: bool) -> None:
    shapes = [
        Attention(2, 4, kv_heads, 96, width, causal, dtype, lies)
        for kv_heads in (1, 2, 4)
        for width in (64, 128)
        for dtype in ("bfloat16", "float16")
        for lies in ("heads", "positions")
    ]
    right(world, attention_ranks.judged, shapes, 2)


@worlds
@both
def test_large(world: int, causal: bool) -> None:
    right(world, attention_ranks.judged, [Attention(1, 8, 2, 4096, causal=causal)], 1)


@several
def test_late_ranks_and_reused_memory(world: int) -> None:
    right(world, attention_ranks.skewed, MIXED, 40, 2)


@several
def test_many_calls_in_the_queue(world: int) -> None:
    right(world, attention_ranks.queued, MIXED, 40, 3)


@worlds
def test_graphs(world: int) -> None:
    right(world, attention_ranks.replayed, MIXED, 50)


@several
def test_two_streams(world: int) -> None:
    right(world, attention_ranks.two_streams, MIXED, 16)


@several
@both
def test_results_are_always_the_same_bits(world: int, causal: bool) -> None:
    right(world, attention_ranks.repeated, Attention(1, 8, 2, 512, causal=causal), 12)


@several
@both
def test_extreme_scores(world: int, causal: bool) -> None:
    right(world, attention_ranks.extreme, Attention(1, 4, 2, 128, causal=causal, dtype="float16"))


@several
@both
def test_nan_passes(world: int, causal: bool) -> None:
    right(world, attention_ranks.nan_passes, Attention(1, 2, 2, 64, causal=causal))


@pytest.mark.parametrize("world", [pytest.param(2, marks=takes_ranks(2))])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, world: int) -> None:
    shape = Attention(1, 4, 2, 128, causal=True)
    assert all(launched(world, attention_ranks.faulty, shape, fault)), "on every rank"


@pytest.mark.parametrize("world", [pytest.param(2, marks=takes_ranks(2))])
def test_sizes_that_are_refused(world: int) -> None:
    for shape in (Attention(1, 2, 2, 48, causal=True), Attention(1, 2, 2, 40)):
        with pytest.raises(ShapeError, match="nearest"):
            launched(world, attention_ranks.judged, [shape], 0)


@several
def test_an_absent_rank_is_a_time_out_that_says_who_waited_for_what(world: int) -> None:
    judge_absence("hopper", Attention(1, 4, 2, 128, causal=True), world)


@several
def test_a_rank_killed_while_others_wait_for_it(world: int) -> None:
    judge_survivors("hopper", Attention(1, 4, 2, 256), world)


IN_PIECES = [
    Attention(1, 4, 2, 512, causal=True),
    Attention(2, 4, 1, 320, width=64, lies="positions"),
    Attention(1, 8, 2, 480, causal=True, dtype="float16", lies="positions"),
    Attention(2, 2, 2, 192, dtype="float16"),
]


def packed(chance: random.Random, world: int) -> Attention:
    """Any legal size with documents: some of one position, some empty, some over ranks."""
    shape = drawn(chance)
    length = shape.rows * world
    seam = length // (2 * world) * chance.randint(0, 2 * world)
    inner = [chance.randint(0, length) for _ in range(chance.choice((0, 1, 3, 30)))]
    inner += [min(length, max(0, seam + by)) for by in chance.sample((-1, 0, 0, 1), 2)]
    bounds = (0, *sorted(inner), length)
    return replace(shape, documents=bounds, told_on=chance.choice(("cuda", "cpu")))


@worlds
@packs
def test_packed_documents(world: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    print(f"seed {seed}")
    right(world, attention_ranks.judged, [packed(chance, world) for _ in range(DRAWS)], seed)


@several
@packs
def test_documents_that_begin_elsewhere_in_every_replay(world: int) -> None:
    shape = Attention(2, 4, 2, 256, causal=True, documents=(0, 7, 200, 201, 256 * world))
    right(world, attention_ranks.other_boundaries, shape, 10)


@pytest.mark.parametrize("world", [pytest.param(2, marks=takes_ranks(2))])
@packs
def test_a_document_that_begins_one_key_late_is_seen(world: int) -> None:
    shape = Attention(1, 4, 2, 128, causal=True, documents=(0, 16, 40, 100, 256))
    assert all(launched(world, attention_ranks.faulty, shape, "boundary")), "on every rank"


BY_CORE = [
    Attention(1, 4, 4, 288, causal=True, width=128, way="parts"),
    Attention(2, 4, 1, 128, width=128, lies="positions", way="parts"),
    Attention(1, 8, 2, 512, causal=True, width=128, dtype="float16", lies="positions", way="parts"),
    Attention(1, 8, 8, 4096, width=128, way="parts"),
    Attention(1, 8, 2, 4096, causal=True, width=128, way="parts"),
]


@worlds
def test_by_our_own_kernel(world: int) -> None:
    right(world, attention_ranks.by_core, attention_ranks.judged, BY_CORE, 3, run=mkernel.launch)


@worlds
def test_graphs_by_our_own_kernel(world: int) -> None:
    right(world, attention_ranks.by_core, attention_ranks.replayed, BY_CORE, 20, run=mkernel.launch)


@worlds
@pytest.mark.parametrize("late", [False, True], ids=["even", "late"])
@pieces
def test_in_pieces(world: int, late: bool) -> None:
    right(world, attention_ranks.in_pieces, IN_PIECES, 64, 1, late, run=mkernel.launch)


@several
@pieces
def test_a_graph_in_pieces(world: int) -> None:
    right(world, attention_ranks.replayed_in_pieces, IN_PIECES, 64, 10, run=mkernel.launch)


@pytest.mark.parametrize("world", [pytest.param(2, marks=takes_ranks(2))])
@pieces
def test_faults_in_pieces_are_seen(world: int) -> None:
    shape = Attention(1, 4, 2, 2048)
    seen: set[str] = set()
    for found in launched(world, attention_ranks.faulty_in_pieces, shape, 64):
        seen |= {fault for fault, failures in found.items() if failures}
    assert seen == set(FAULTS_IN_PIECES)


@pytest.mark.alone
@pytest.mark.parametrize("world", [pytest.param(2, marks=takes_ranks(2))])
@both
@pieces
def test_a_million_positions_in_a_gibibyte(world: int, causal: bool) -> None:
    for found in launched(world, attention_ranks.a_million, causal):
        print(found)
        assert found["taken"] <= 1 << 30, found
        assert all(found["errors"][name] <= limit for name, limit in found["limits"].items()), found


@worlds
@gradients
def test_gradients_of_random_shapes(world: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    print(f"seed {seed}")
    # Large scores make weights of nearly 1, where dO·v - dO·O cancels: the library itself is off there.
    shapes = [
        replace(shape, scale=scale)
        for shape in (drawn(chance) for _ in range(GRADIENT_DRAWS[world] // 2))
        for scale in chance.sample((None, 0.05, -0.1), 2)
    ]
    right(world, attention_ranks.trained, shapes, seed)


@several
@gradients
def test_gradients_in_lots_of_heads(world: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    chance = random.Random(seed)
    print(f"seed {seed}")
    shapes = [replace(drawn(chance), scale=None) for _ in range(16)]
    shapes.append(Attention(2, 6, 3, 96, width=64, causal=True, lies="positions"))
    right(world, attention_ranks.trained_in_lots, shapes, seed, run=mkernel.launch)


@worlds
@gradients
def test_gradients_of_large_ones(world: int) -> None:
    shapes = [Attention(1, 8, 2, 2048, causal=causal) for causal in (False, True)]
    right(world, attention_ranks.trained, shapes, 1)


@several
@gradients
def test_gradients_of_the_log_sum_exp(world: int) -> None:
    shapes = [
        Attention(2, 4, 2, 128, width, causal, dtype, lies)
        for causal in (False, True)
        for width, dtype, lies in (
            (128, "bfloat16", "heads"), (64, "float16", "positions"), (64, "bfloat16", "heads"),
        )
    ]  # fmt: skip
    right(world, attention_ranks.trained, shapes, 1, True)


@several
@gradients
def test_gradients_with_late_ranks(world: int) -> None:
    right(world, attention_ranks.trained_in_any_order, MIXED, 40)


@worlds
@gradients
def test_gradients_in_a_graph(world: int) -> None:
    shapes = [Attention(1, 8, 4, 256, causal=causal) for causal in (False, True)]
    right(world, attention_ranks.trained_in_a_graph, shapes, 10)


@several
@gradients
def test_gradients_are_the_same_bits_where_torch_promises_it(world: int) -> None:
    shapes = [Attention(1, 8, 2, 512, causal=causal) for causal in (False, True)]
    right(world, attention_ranks.same_gradients, shapes, 8)


@pytest.mark.parametrize("world", [pytest.param(2, marks=takes_ranks(2))])
@gradients
def test_faults_of_gradients_are_seen(world: int) -> None:
    shape = Attention(1, 4, 2, 128, causal=True)
    for found in launched(world, attention_ranks.faulty_gradients, shape):
        assert {fault for fault, failures in found.items() if failures} == set(GRADIENT_FAULTS)


@needs_gpus(2)
def test_widths_that_it_does_not_take_run_on_the_companion() -> None:
    found = launched(2, attention_ranks.runs_on, (64, 32, 128), accelerator="hopper,streams")
    assert found == [["hopper", "streams", "hopper"]] * 2
