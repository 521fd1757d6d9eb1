"""Nodes of several ranks on GPUs: each pair of ranks of two nodes exchanges by the NIC, or,
hierarchically, one rank of a node for all of it; the NIC's counters of bytes tell which."""

from __future__ import annotations

import nodes_ranks
import pytest
from device_buffers import takes_ranks
from hopper_ranks import Shape
from test_hopper_nodes import both, launched, nics, take

from mkernel.plan.standard import GAIN

pytestmark = [takes_ranks(4), pytest.mark.usefixtures("leaves_nothing")]

SHARED = [
    Shape("all_gather_gemm", 1536, 512, 1024),
    Shape("gemm_reduce_scatter", 2048, 768, 256),
    Shape("gemm_all_reduce", 520, 1024, 320, layout="column"),
    Shape("all_gather_gemm", 96, 64, 4096, dtype="float16"),
    Shape("gemm_all_reduce", 2048, 2048, 512),
    Shape("all_gather_gemm", 4096, 256, 2048),
]
"""Of 4 ranks."""

exchanges = pytest.mark.parametrize("exchange", ["direct", "hierarchical"])
shared = pytest.mark.parametrize(
    ("nodes", "ranks"),
    [
        pytest.param(2, 2, marks=takes_ranks(4)),
        pytest.param(3, 2, marks=takes_ranks(6)),
        pytest.param(2, 3, marks=takes_ranks(6)),
    ],
)
"""Worlds whose nodes have several ranks, so that the exchanges differ."""


@nics
@both
@exchanges
@shared
def test_the_bytes_over_the_rails_are_those_of_the_exchange(
    nodes: int, ranks: int, exchange: str, route: str, nic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row crosses once for each rank of another node, or once for the node; every reader gets it."""
    take(route, monkeypatch)
    monkeypatch.setenv("MKERNEL_EXCHANGE", exchange)
    monkeypatch.setenv("MKERNEL_SOFTVERBS_SCRAMBLE", str(nodes_ranks.MASK))
    rows, k = 256, 1024
    found = launched(nodes_ranks.arrived, rows, k, nic=nic, nodes=nodes, ranks=ranks)
    copies = (nodes - 1) * (1 if exchange == "hierarchical" else ranks)
    for rank, (arrived, put, _) in enumerate(found):
        assert arrived == [
            "intact" if other // ranks == rank // ranks else "scrambled"
            for other in range(nodes * ranks)
        ]
        assert put == copies * rows * k * 2


@nics
@pytest.mark.parametrize(
    ("op", "exchange"),
    [
        ("gemm_reduce_scatter", "direct"),
        ("gemm_reduce_scatter", "hierarchical"),
        ("gemm_all_reduce", "direct"),
        ("gemm_all_reduce", "hierarchical"),
    ],
)
@shared
def test_the_sums_over_the_rails_are_those_of_the_exchange(
    nodes: int, ranks: int, op: str, exchange: str, nic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank sends its part to each rank of another node, or its node's sum to one rank there; and an
    all-reduce sends the sum of its rows back on the same ways."""
    monkeypatch.setenv("MKERNEL_EXCHANGE", exchange)
    rows, n = 512, 512
    found = launched(nodes_ranks.summed, op, rows, n, nic=nic, nodes=nodes, ranks=ranks)
    copies = (nodes - 1) * (1 if exchange == "hierarchical" else ranks)
    copies *= 2 if op == "gemm_all_reduce" else 1
    for failures, put, planned in found:
        assert not failures
        assert planned == exchange
        assert put == copies * rows * n * 2


@nics
@pytest.mark.parametrize(
    "shape",
    [
        Shape("all_gather_gemm", 2048, 512, 1024),
        Shape("gemm_reduce_scatter", 2048, 1024, 512),
        Shape("gemm_all_reduce", 2048, 1024, 512),
    ],
    ids=lambda shape: shape.op,
)
def test_the_planner_takes_the_exchange_that_it_predicts_to_be_faster(
    shape: Shape, nic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default; and the bytes that the NIC counts are those of its choice."""
    monkeypatch.setenv("MKERNEL_SOFTVERBS_BANDWIDTH_MBPS", "100000")
    found = launched(nodes_ranks.chosen, shape, nic=nic, nodes=2, ranks=2)
    columns = shape.k if shape.op == "all_gather_gemm" else shape.n
    copies = 2 if shape.op == "gemm_all_reduce" else 1
    for failures, put, planned, (direct_us, hierarchical_us) in found:
        assert not failures
        assert hierarchical_us < (1 - GAIN) * direct_us
        assert planned == "hierarchical"
        assert put == copies * shape.m // 4 * columns * 2
