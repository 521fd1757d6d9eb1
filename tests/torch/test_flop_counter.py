"""torch's ``FlopCounterMode`` counts the products of every op, on each rank those that it makes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import SCALED_MM, on_ranks
from torch import Tensor
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import mkernel
from mkernel.nn import ColumnParallelLinear

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
M, K, N = 16, 32, 8
"""Rows of all ranks together, K of a rank, columns of a rank."""
ONE = 2 * M * K * N
T, H, F, EXPERTS, TOP_K = 6, 8, 12, 4, 2
ROWS = T * TOP_K
"""Counts the rows of a rank's experts, where each gets as many as any other."""


def counted(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def drawn(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape).requires_grad_(grad)


def backward(result: Any) -> None:
    (result[0] if isinstance(result, tuple) else result).sum().backward()


def of_products() -> dict[str, tuple[int, int]]:
    """Return, by call, the operations that were counted and those that the products take."""
    part, whole, b = drawn(M // RANKS, K), drawn(M, K), drawn(K, N)
    fixed = part.detach()
    found = {}

    def expect(name: str, wanted: int, call: Callable[[], Any]) -> None:
        for again in range(2):  # also a call that is known
            found[f"{name}, {again}"] = (counted(call), wanted)

    gather, scatter = mkernel.all_gather_gemm, mkernel.gemm_reduce_scatter
    expect("gather", 3 * ONE, lambda: backward(gather(part, b)))
    expect("gather, of b", 2 * ONE, lambda: backward(gather(fixed, b)))
    expect("gather, kept", 3 * ONE, lambda: backward(gather(part, b, return_gathered=True)))
    expect("gather, several", 2 * ONE, lambda: gather(part, [b, b]))
    expect("scatter", 3 * ONE, lambda: backward(scatter(whole, b)))
    expect("scatter, of b", 2 * ONE, lambda: backward(scatter(whole.detach(), b)))
    expect("reduce", 3 * ONE, lambda: backward(mkernel.gemm_all_reduce(whole, b)))
    norm = torch.ones(N)
    expect("norm", ONE, lambda: mkernel.gemm_all_reduce(whole, b, norm_weight=norm))
    with torch.no_grad():
        out = torch.empty(M, N)
        expect("gather, without gradients", ONE, lambda: gather(part, b))
        expect("gather, into out", ONE, lambda: gather(part, b, out=out))
        expect("reduce, into out", ONE, lambda: mkernel.gemm_all_reduce(whole, b, out=out))
        expect("sum", 0, lambda: mkernel.all_reduce(out))
    along = drawn(2, M // RANKS // 2, K)
    expect("gather along 1", ONE, lambda: gather(along, b, gather_dim=1))
    layer = ColumnParallelLinear(K, N * RANKS, sequence_parallel=False)
    expect("replicated", 3 * ONE, lambda: backward(layer(whole)))
    return found


def test_products() -> None:
    for rank in on_ranks(of_products, ranks=RANKS):
        assert {name: each for name, each in rank.items() if each[0] != each[1]} == {}


def of_scaled() -> list[int]:
    a, b = (
        torch.ones(M, 2 * K).to(torch.float8_e4m3fn),
        torch.ones(N, 2 * K).to(torch.float8_e4m3fn),
    )
    scales = {"a_scale": torch.ones(1, 1), "b_scale": torch.ones(1, 1)}
    return [
        counted(lambda: mkernel.all_gather_gemm(a, b.t(), **scales)),
        counted(lambda: mkernel.gemm_all_reduce(a, b.t(), **scales)),
        counted(lambda: mkernel.gemm_reduce_scatter(a, b.t(), **scales)),
    ]


@pytest.mark.skipif(not SCALED_MM, reason="this torch multiplies no e4m3 on CPUs")
def test_scaled_products() -> None:
    for rank in on_ranks(of_scaled, ranks=RANKS):
        assert rank == [4 * ONE, 2 * ONE, 2 * ONE]


def of_experts() -> dict[str, int]:
    """Each rank's experts get as many rows as tokens have places."""
    x, w1, w2 = drawn(T, H), drawn(EXPERTS // RANKS, H, 2 * F), drawn(EXPERTS // RANKS, F, H)
    ids = torch.tensor([[0, 2]] * T)
    weights = torch.ones(T, TOP_K)
    sent = mkernel.moe_dispatch_gemm(x, ids, w1)
    h = sent.outputs.detach()[:, :F].contiguous().requires_grad_()
    home = mkernel.moe_gemm_combine(h, w2, sent.handle, weights)
    return {
        "dispatch": counted(lambda: mkernel.moe_dispatch_gemm(x, ids, w1)),
        "of a dispatch": counted(lambda: sent.outputs.sum().backward(retain_graph=True)),
        "combine": counted(lambda: mkernel.moe_gemm_combine(h, w2, sent.handle, weights)),
        "of a combine": counted(lambda: home.sum().backward(retain_graph=True)),
    }


def test_products_of_experts() -> None:
    dispatched, combined = 2 * ROWS * H * 2 * F, 2 * ROWS * F * H
    for rank in on_ranks(of_experts, ranks=RANKS):
        assert rank == {
            "dispatch": dispatched,
            "of a dispatch": 2 * dispatched,
            "combine": combined,
            "of a combine": 2 * combined,
        }


def of_attention() -> tuple[int, int]:
    q, k, v = drawn(2, 4, T, H), drawn(2, 2, T, H), drawn(2, 2, T, H)
    out = mkernel.ring_attention(q, k, v)
    forward = counted(lambda: mkernel.ring_attention(q, k, v))
    return forward, counted(lambda: out.sum().backward(retain_graph=True))


def test_attention_counts_as_torchs() -> None:
    """A rank has its share of what torch counts for the whole sequence."""
    q = k = (2, 4, RANKS * T, H)
    forward, backward = sdpa_flop_count(q, k, k), sdpa_backward_flop_count(q, q, k, k)
    for rank in on_ranks(of_attention, ranks=RANKS):
        assert rank == (forward // RANKS, backward // RANKS)


_FIRST_CALL = """
import torch, mkernel
from torch.utils.flop_counter import FlopCounterMode
mkernel.init(accelerator="streams")
with FlopCounterMode(display=False) as counter:
    mkernel.all_gather_gemm(torch.ones(4, 8), torch.ones(8, 2))
print(counter.get_total_flops())
mkernel.finalize()
"""


def test_a_counter_that_is_made_before_the_first_call() -> None:
    """It copies torch's formulas when it is made."""
    ended = subprocess.run(
        [sys.executable, "-c", _FIRST_CALL], capture_output=True, text=True, check=False
    )
    assert ended.stdout == f"{2 * 4 * 8 * 2}\n", ended.stderr
