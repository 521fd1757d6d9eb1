"""The least that bytes and work over rates allow."""

from __future__ import annotations

import pytest

from mkernel.harness.floors import Rates, floor_us, floors
from mkernel.plan.model import CombineShape, GemmShape

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


def test_one_rank_sends_nothing() -> None:
    found = floors("all_gather_gemm", GemmShape(m=64, n=64, k=64), "float16", 1, RATES)
    assert [one.us for one in found[1:]] == [0.0, 0.0]
