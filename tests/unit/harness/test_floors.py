"""The least that bytes and work over rates allow."""

from __future__ import annotations

import pytest

from mkernel.harness.floors import Rates, floor_us, floors
from mkernel.plan.model import AttentionShape, CombineShape, GemmShape, MoeShape

RATES = Rates(matrix_tflops=350.0, sums_gbs=20000.0, link_gbs=28.0, egress_gbs=196.0, launch_us=5.0)


@pytest.mark.parametrize(("n", "k", "link_us"), [(1536, 4096, 168.5), (6144, 1536, 674.1)])
def test_all_reduce_sends_sums_and_results_in_16_bits(n: int, k: int, link_us: float) -> None:
    found = floors("gemm_all_reduce", GemmShape(m=6144, n=n, k=k), "bfloat16", 8, RATES)
    products, link, egress = found
    assert link.us == pytest.approx(link_us, rel=1e-3)
    assert egress.us == pytest.approx(link.us)  # seven links of 28 GB/s
    assert products.us == pytest.approx(2 * 6144 * n * k / 350e6)
    assert floor_us(found, RATES) == max(products.us, link.us) + 5.0


def test_a_combine_adds_in_float32() -> None:
    shape = CombineShape(tokens=64, top_k=4, experts=8, features=256)
    sums, *links = floors("moe_combine", shape, "float16", 2, RATES)
    assert sums.us == pytest.approx(2 * 64 * 4 * 256 * 4 / 20e6)
    assert links[0].amount == 64 * 4 / 2 * 256 * 2


@pytest.mark.parametrize(("world", "tokens"), [(2, 64 * 69 / 70), (4, 64 * 55 / 70), (8, 32)])
def test_a_dispatch_sends_a_token_once_to_a_rank(world: int, tokens: float) -> None:
    """A token has 70 choices of four in eight experts; 1, 15 or 35 contain none of a rank's."""
    shape = MoeShape(tokens=64, top_k=4, experts=8, hidden=128, features=256)
    link = floors("moe_dispatch_gemm", shape, "float16", world, RATES)[1]
    assert link.amount == pytest.approx(tokens * 128 * 2)


def test_scores_pass_the_memory_where_units_meet_in_it() -> None:
    """12 bytes each, of 16-bit weights."""
    shape = AttentionShape(batch=1, heads=4, kv_heads=2, sequence=4096, head_dim=128, causal=True)
    together = floors("ring_attention", shape, "float16", 2, RATES)
    assert [one.resource for one in together] == ["products", "one link", "egress"]
    apart = RATES._replace(between_units_gbs=3000.0)
    found = floors("ring_attention", shape, "float16", 2, apart)[1]
    assert found.amount == 12 * 4 * 2048 * 4096 / 2
    assert found.us == pytest.approx(found.amount / 3e6)


def test_one_rank_sends_nothing() -> None:
    found = floors("all_gather_gemm", GemmShape(m=64, n=64, k=64), "float16", 1, RATES)
    assert [one.us for one in found[1:]] == [0.0, 0.0]
