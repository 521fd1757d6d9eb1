"""Bytes of calls, counted by hand from a routing; expected ones are the mean of random routings."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from mkernel.errors import ArgumentError
from mkernel.plan.model import (
    AttentionShape,
    CombineShape,
    GemmCombineShape,
    GemmShape,
    MoeShape,
    OpName,
    Shape,
)
from mkernel.plan.pipeline import Exchange, Returns
from mkernel.plan.traffic import ExpectedTokens, RoutedTokens, Traffic, Way, flows

WORLD, NODES, EACH = 4, 2, 2
SIZES = {"tokens": 3, "experts": 8, "top_k": 3}
MOE = MoeShape(**SIZES, hidden=5, features=7)
HOME = GemmCombineShape(**SIZES, hidden=5, features=7, partial_dtype="float16")
IDS = [
    [[0, 1, 4], [2, 3, 6], [-1, -1, 5]],  # to ranks 0 0 2 · 1 1 3 · 2
    [[7, 6, 5], [0, 2, 4], [0, 1, 3]],
    [[-1, -1, -1], [1, 3, 5], [2, 6, 7]],
    [[4, 4, 4], [5, 6, 7], [8, 0, 0]],  # an expert twice, and a number that is none's
]
ROUTED = RoutedTokens(IDS, 8, NODES)
ROW, IDS_BYTES, WEIGHTS = 5 * 2, 3 * 3 * 4, 3 * 4


def traffic(op: str, shape: Shape, exchange: Exchange, returns: Returns = "slots") -> Traffic:
    way = Way(exchange=exchange, returns=returns, node_sums="float32")
    found = flows(cast(OpName, op), shape, "float16", WORLD, NODES, way, ROUTED)
    return Traffic(NODES, EACH, exchange, found)


def test_numbers_of_a_routing() -> None:
    assert [ROUTED.to_rank(0, rank) for rank in range(WORLD)] == [1, 1, 2, 1]
    assert [ROUTED.slots(0, rank) for rank in range(WORLD)] == [2, 2, 2, 1]
    assert [[ROUTED.to_node(rank, node) for node in range(NODES)] for rank in range(WORLD)] == [
        [2, 3], [2, 2], [2, 2], [1, 2]
    ]  # fmt: skip
    with pytest.raises(ArgumentError, match="8 experts evenly"):
        RoutedTokens(IDS[:3], 8, 1)


def test_a_token_crosses_once_to_a_node_by_the_rank_in_its_place() -> None:
    direct = traffic("moe_dispatch_gemm", MOE, "direct")
    assert direct.from_rank(0) == {1: ROW + IDS_BYTES, 2: 2 * ROW + IDS_BYTES, 3: ROW + IDS_BYTES}
    relayed = traffic("moe_dispatch_gemm", MOE, "hierarchical")
    # Its own tokens for rank 1, and those of rank 2 that rank 1 wants; ids of both.
    near = (ROUTED.to_rank(0, 1) + ROUTED.to_rank(2, 1)) * ROW + 2 * IDS_BYTES
    assert relayed.from_rank(0) == {1: near, 2: 3 * ROW + IDS_BYTES}
    assert (ROUTED.to_rank(0, 1), ROUTED.to_rank(2, 1)) == (1, 2)


@pytest.mark.parametrize("returns", ["slots", "ranks"])
def test_results_of_a_node_come_home_as_one_sum(returns: Returns) -> None:
    direct = traffic("moe_gemm_combine", HOME, "direct", returns)
    relayed = traffic("moe_gemm_combine", HOME, "hierarchical", returns)
    of = ROUTED.slots if returns == "slots" else ROUTED.to_rank

    def weights(*pairs: tuple[int, int]) -> int:
        return sum(ROUTED.to_rank(*pair) for pair in pairs) * WEIGHTS if returns == "ranks" else 0

    assert direct.sent(3, 0) == of(0, 3) * ROW + weights((3, 0))
    near = of(1, 2) + of(3, 2)  # results on rank 2, of tokens of rank 3 and of the ward 1 of it
    assert relayed.sent(2, 3) == near * ROW + weights((2, 3), (0, 3))
    assert relayed.sent(3, 0) == 0
    # Sums of the tokens of rank 0, as node_sums has them, and the weights of own ones for node 0.
    assert relayed.sent(2, 0) == ROUTED.to_node(0, 1) * 5 * 4 + ROUTED.to_node(2, 0) * WEIGHTS


@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_are_seen_cross_once_to_each_node_that_sees_them(causal: bool) -> None:
    """Of a zigzag later ranks see the first half; a relay passes on what its neighbour sees."""
    shape = AttentionShape(batch=2, heads=6, kv_heads=3, sequence=64, head_dim=8, causal=causal)
    whole = 2 * 2 * 3 * 16 * 8 * 2
    half = whole // 2 if causal else whole

    def sent(exchange: Exchange, rank: int) -> dict[int, float]:
        way = Way(exchange, keys="seen")
        of = flows("ring_attention", shape, "float16", WORLD, NODES, way)
        return Traffic(NODES, WORLD // NODES, exchange, of).from_rank(rank)

    assert sent("direct", 1) == {0: whole, 2: half, 3: half}
    assert sent("hierarchical", 1) == {0: 2 * whole, 3: half}
    assert sent("hierarchical", 2) == {0: whole, 3: 2 * half}
    assert sent("hierarchical", 0) == {1: half + whole, 2: half}


def test_products_relay_a_shard_for_each_node() -> None:
    shape = GemmShape(m=8, n=6, k=10)
    for op, part in (("all_gather_gemm", 2 * 10 * 2), ("gemm_reduce_scatter", 2 * 6 * 2)):
        found = traffic(op, shape, "hierarchical")
        assert found.from_rank(0) == {1: 2 * part, 2: part}
        assert traffic(op, shape, "direct").from_rank(0) == dict.fromkeys((1, 2, 3), part)


def test_uniform_routing_is_what_random_routings_are_in_the_mean() -> None:
    shape = CombineShape(tokens=400, features=1, experts=16, top_k=3)
    expected, draw = ExpectedTokens(shape, WORLD, NODES), torch.Generator().manual_seed(3)
    ids = torch.rand(WORLD, 400, 16, generator=draw).argsort(2)[..., :3]
    found = RoutedTokens(ids.tolist(), 16, NODES)
    for source in range(WORLD):
        for rank in range(WORLD):
            assert found.to_rank(source, rank) == pytest.approx(expected.to_rank(0, 0), rel=0.15)
            assert found.slots(source, rank) == pytest.approx(expected.slots(0, 0), rel=0.2)
        for node in range(NODES):
            assert found.to_node(source, node) == pytest.approx(expected.to_node(0, 0), rel=0.1)
