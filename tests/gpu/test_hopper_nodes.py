"""The GEMM ops between nodes on GPUs: kernels push commands, an emulated NIC carries the bytes, and
arrivals are republished on the device. Each rank may be a node of its own; ranks may share a device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import attention_ranks
import calls
import nodes_ranks
import pytest
from attention_ranks import Attention
from device_buffers import takes_ranks
from hopper_ranks import OPS, Shape
from in_world import TOLD_S
from kept_ranks import none_failed
from moe_ranks import PERMUTED, Moe

import mkernel
from mkernel.backends import registry
from mkernel.settings import load

pytestmark = [takes_ranks(2), pytest.mark.usefixtures("leaves_nothing")]

NICS = ("cx7", "efa")
nics = pytest.mark.parametrize("nic", NICS)
ops = pytest.mark.parametrize("op", OPS)
worlds = pytest.mark.parametrize(
    ("nodes", "ranks"),
    [
        (2, 1),
        pytest.param(3, 1, marks=takes_ranks(3)),
        pytest.param(2, 2, marks=takes_ranks(4)),
    ],
)
MIXED = [
    Shape("all_gather_gemm", 1536, 512, 1024),
    Shape("gemm_reduce_scatter", 1536, 768, 256),
    Shape("gemm_all_reduce", 520, 1024, 320, layout="column"),
    Shape("all_gather_gemm", 96, 64, 4096, dtype="float16"),
    Shape("gemm_all_reduce", 2048, 2048, 512),
]
SHARING = load().ranks_per_device
TURNS = SHARING > 1 and not registry.accelerator("hopper").side_by_side(SHARING).usable
direct = pytest.mark.skipif(
    TURNS,
    reason="where processes take turns on a GPU, a copy of the mover at times does not end within 10 s "
    "while kernels run, and the emulated device then fails (DEVICE_FATAL); run it under MPS",
)
both = pytest.mark.parametrize(
    "route", [pytest.param("direct", marks=[direct, pytest.mark.alone]), "staged"]
)
"""NICs read and write memory of the device, or of the host. Other tests take the usual one of an
emulated NIC, which is staged."""


def take(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_NIC_SETTINGS__GPUDIRECT", str(int(route == "direct")))


def right(fn: Any, *arguments: Any, nic: str, nodes: int = 2, ranks: int = 1) -> None:
    """No rank found a failure."""
    found = mkernel.launch(
        fn, *arguments, nodes=nodes, ranks_per_node=ranks, accelerator="hopper", nic=nic,
        verbs="soft", timeout_s=TOLD_S,
    )  # fmt: skip
    none_failed(found)


@nics
@ops
@both
def test_the_route_is_the_planned_one(
    op: str, nic: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(route, monkeypatch)
    shape = Shape(op, 512, 512, 512)
    found = mkernel.launch(
        nodes_ranks.staged, shape, nodes=2, ranks_per_node=1, accelerator="hopper", nic=nic,
        verbs="soft", timeout_s=TOLD_S,
    )  # fmt: skip
    for staged, host, device in found:
        assert staged == (route == "staged")
        assert (host > 0, device > 0) == (staged, not staged)


@nics
@worlds
def test_random_shapes(nodes: int, ranks: int, nic: str) -> None:
    right(calls.judged, random_shapes(nodes * ranks, OPS), 1, nic=nic, nodes=nodes, ranks=ranks)


def random_shapes(world: int, ops: Sequence[str]) -> list[Shape]:
    """24 of them, the seed printed."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    shapes = []
    for op in itertools.islice(itertools.cycle(ops), 24):
        gathers = op == "all_gather_gemm"
        # In fewer sums the error of parts that are rounded once scatters beyond the limit.
        rows = chance.randint(1 if gathers else 200, 2000)
        shapes.append(
            Shape(
                op,
                m=rows if op == "gemm_all_reduce" else rows // world * world or world,
                n=8 * chance.randint(1 if gathers else 20, 200),
                k=8 * chance.randint(1, 260),
                dtype=chance.choice(("bfloat16", "float16")),
                layout=chance.choice(("row", "column")),
            )
        )
    return shapes


@nics
def test_late_ranks_and_reused_memory(nic: str) -> None:
    right(calls.skewed, MIXED, 40, 2, nic=nic)


@nics
def test_many_calls_in_the_queue(nic: str) -> None:
    right(calls.queued, MIXED, 40, 3, nic=nic)


@nics
def test_graphs(nic: str) -> None:
    right(calls.replayed, MIXED[:3], 40, nic=nic)


@nics
@ops
@both
def test_results_are_always_the_same_bits(
    op: str, nic: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(route, monkeypatch)
    found = mkernel.launch(
        calls.same_bits, [Shape(op, 2048, 1536, 1024)], 10, nodes=2, ranks_per_node=1,
        accelerator="hopper", nic=nic, verbs="soft", timeout_s=TOLD_S,
    )  # fmt: skip
    none_failed([failures for failures, _ in found])


def test_many_repeated_and_late_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_DUPLICATES", "50")
    monkeypatch.setenv("MKERNEL_SOFTVERBS_HOLD_NS", "400000")
    right(calls.skewed, MIXED, 20, 6, nic="efa")


@nics
@worlds
def test_every_byte_of_another_node_came_through_the_nic(
    nodes: int, ranks: int, nic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_SCRAMBLE", str(nodes_ranks.MASK))
    found = mkernel.launch(
        nodes_ranks.arrived, 256, 1024, nodes=nodes, ranks_per_node=ranks, accelerator="hopper",
        nic=nic, verbs="soft", timeout_s=TOLD_S,
    )  # fmt: skip
    for rank, (arrived, put, expected) in enumerate(found):
        node = rank // ranks
        assert arrived == [
            "intact" if other // ranks == node else "scrambled" for other in range(nodes * ranks)
        ]
        assert put == expected


@pytest.mark.alone
@direct
def test_what_a_nic_wrote_is_flushed_before_it_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device holds back what it wrote into device memory until the flush; without one, results are
    wrong (``tests/gpu/test_mover.py`` leaves it out)."""
    take("direct", monkeypatch)
    monkeypatch.setenv("MKERNEL_SOFTVERBS_UNFLUSHED", "1")
    right(calls.judged, MIXED[:1], 8, nic="cx7")


ATTENTION = [
    Attention(1, 4, 4, 256, causal=True),
    Attention(2, 4, 1, 128, width=64, lies="positions"),
    Attention(1, 8, 2, 512, causal=True, dtype="float16", lies="positions"),
    Attention(2, 2, 2, 64, dtype="float16"),
]


@worlds
@nics
@both
def test_attention(
    nodes: int, ranks: int, nic: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(route, monkeypatch)
    right(calls.judged, ATTENTION, 1, nic=nic, nodes=nodes, ranks=ranks)


@nics
def test_attention_of_random_shapes(nic: str) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    shapes = [attention_ranks.drawn(chance) for _ in range(40)]
    right(calls.judged, shapes, seed, nic=nic)


@nics
def test_attention_of_late_ranks_between_products_and_in_graphs(nic: str) -> None:
    right(calls.skewed, ATTENTION, 12, 2, nic=nic)
    right(calls.replayed, ATTENTION, 12, nic=nic)


@nics
@both
def test_keys_cross_once_for_each_rank_of_another_node(
    nic: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte; scrambled on their way, they give other results."""
    take(route, monkeypatch)
    for mask in (0, nodes_ranks.MASK):
        monkeypatch.setenv("MKERNEL_SOFTVERBS_SCRAMBLE", str(mask))
        found = mkernel.launch(
            nodes_ranks.attended, ATTENTION[2], nodes=2, ranks_per_node=1, accelerator="hopper",
            nic=nic, verbs="soft", timeout_s=TOLD_S,
        )  # fmt: skip
        for failures, put, expected, on_host in found:
            assert bool(failures) == bool(mask)
            assert put == expected
            assert (on_host > 0) == (route == "staged")


@nics
def test_attention_of_packed_documents(nic: str) -> None:
    shape = Attention(2, 4, 2, 256, causal=True, documents=(0, 7, 200, 201, 512))
    right(calls.judged, [shape], 1, nic=nic)


EXPERTS = [
    Moe(37, hidden=72, features=136, experts=3, top_k=3),
    Moe(300, 512, 264, 4, 4, routing="padded", capacity=4 * 300 * 4, narrow=True),
    Moe(65, 128, 64, 2, 2, routing="empty_ranks", dtype="float16"),
    Moe(1100, 256, 256, 2, 2, activation="silu_and_mul", layout="column"),
]


@worlds
@nics
@both
def test_experts(
    nodes: int, ranks: int, nic: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(route, monkeypatch)
    right(calls.judged, EXPERTS, 1, nic=nic, nodes=nodes, ranks=ranks)
    right(calls.decided, PERMUTED, calls.judged, EXPERTS, 2, nic=nic, nodes=nodes, ranks=ranks)


@nics
@both
def test_experts_of_late_ranks_and_in_graphs(
    nic: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(route, monkeypatch)
    shapes = [replace(one, capacity=2 * one.tokens * one.top_k) for one in EXPERTS]
    right(calls.queued, shapes, 16, 4, nic=nic)
    right(calls.replayed, shapes[:2], 12, nic=nic)


@nics
def test_tokens_cross_once_for_each_rank_of_another_node(
    nic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, ids, weights and sums, to the byte; scrambled on their way, they give other results."""
    shape = EXPERTS[1]
    for mask in (0, nodes_ranks.MASK):
        monkeypatch.setenv("MKERNEL_SOFTVERBS_SCRAMBLE", str(mask))
        found = mkernel.launch(
            nodes_ranks.dispatched, shape, nodes=2, ranks_per_node=1, accelerator="hopper",
            nic=nic, verbs="soft", timeout_s=TOLD_S,
        )  # fmt: skip
        for failures, put, expected in found:
            assert bool(failures) == bool(mask)
            assert put == expected
