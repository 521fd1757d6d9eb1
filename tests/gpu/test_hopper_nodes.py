"""The GEMM ops between nodes on GPUs: kernels push commands, an emulated NIC carries the bytes, and
arrivals are republished on the device. Each rank may be a node of its own; ranks may share a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import attention_ranks
import calls
import kept_ranks
import moe_ranks
import nodes_ranks
import pytest
from attention_ranks import Attention
from device_buffers import takes_ranks
from hopper_ranks import OPS, Shape
from in_world import TOLD_S
from kept_ranks import none_failed
from moe_ranks import IN_PIECES, Moe

import mkernel
from mkernel.backends import registry
from mkernel.backends.accelerators.cuda.capabilities import MOE
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
DIRECT = (direct, pytest.mark.alone(keeps_ranks=True))
both = pytest.mark.parametrize("route", [pytest.param("direct", marks=DIRECT), "staged"])
"""NICs read and write memory of the device, or of the host. Other tests take the usual one of an
emulated NIC, which is staged."""


def take(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_NIC_SETTINGS__GPUDIRECT", str(int(route == "direct")))


def launched(
    fn: Any,
    *arguments: Any,
    nic: str,
    nodes: int = 2,
    ranks: int = 1,
    timeout_s: float = TOLD_S,
    accelerator: str = "hopper",
    fresh: bool = False,
) -> list[Any]:
    """Return what each rank of these nodes finds. ``fresh``: in processes of its own."""
    run = mkernel.launch if fresh else kept_ranks.run
    found: list[Any] = run(
        fn, *arguments, nodes=nodes, ranks_per_node=ranks, accelerator=accelerator, nic=nic,
        verbs="soft", timeout_s=timeout_s,
    )  # fmt: skip
    return found


@nics
@ops
@both
@pytest.mark.parametrize("accelerator", ["hopper", "cuda"])
def test_the_route_is_the_planned_one(
    op: str, nic: str, route: str, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(route, monkeypatch)
    shape = Shape(op, 512, 512, 512)
    found = launched(nodes_ranks.staged, shape, nic=nic, accelerator=accelerator)
    for staged, host, device in found:
        assert staged == (route == "staged")
        assert (host > 0, device > 0) == (staged, not staged)


@nics
@worlds
@pytest.mark.parametrize("accelerator", ["hopper", "cuda"])
def test_every_byte_of_another_node_came_through_the_nic(
    nodes: int, ranks: int, nic: str, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_SCRAMBLE", str(nodes_ranks.MASK))
    found = launched(
        nodes_ranks.arrived, 256, 1024, nic=nic, nodes=nodes, ranks=ranks, accelerator=accelerator
    )
    for rank, (arrived, put, expected) in enumerate(found):
        node = rank // ranks
        assert arrived == [
            "intact" if other // ranks == node else "scrambled" for other in range(nodes * ranks)
        ]
        assert put == expected


@pytest.mark.alone(keeps_ranks=True)
@direct
def test_what_a_nic_wrote_is_flushed_before_it_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device holds back what it wrote into device memory until the flush; without one, results are
    wrong (``tests/gpu/test_mover.py`` leaves it out)."""
    take("direct", monkeypatch)
    monkeypatch.setenv("MKERNEL_SOFTVERBS_UNFLUSHED", "1")
    none_failed(launched(calls.judged, MIXED[:1], 8, nic="cx7"))


ATTENTION = [
    Attention(1, 4, 4, 256, causal=True),
    Attention(2, 4, 1, 128, width=64, lies="positions"),
    Attention(1, 8, 2, 512, causal=True, dtype="float16", lies="positions"),
    Attention(2, 2, 2, 64, dtype="float16"),
]


BY_KERNEL = [
    Attention(1, 4, 4, 256, causal=True, way="kernel"),
    Attention(2, 4, 1, 128, lies="positions", way="kernel"),
    Attention(1, 8, 2, 768, causal=True, dtype="float16", lies="positions", way="kernel"),
    Attention(2, 2, 2, 1152, width=64, way="kernel"),
]


EXPERTS = [
    Moe(37, hidden=72, features=136, experts=3, top_k=3),
    Moe(300, 512, 264, 4, 4, routing="padded", capacity=4 * 300 * 4, narrow=True),
    Moe(65, 128, 64, 2, 2, routing="empty_ranks", dtype="float16"),
    Moe(1100, 256, 256, 2, 2, activation="silu_and_mul", layout="column"),
]
several = pytest.mark.parametrize(
    ("nodes", "ranks"), [(2, 1), pytest.param(2, 2, marks=takes_ranks(4))]
)
"""With one rank a node there is nobody to relay for."""


def check_bytes(
    rank: int,
    ranks: int,
    exchange: str,
    carried: dict[int, float],
    planned: dict[int, float],
    taken: str,
    of: str = "",
) -> None:
    """Check that the NIC put to each rank what the plan says, and to whom the exchange says."""
    assert carried == planned, of
    assert taken == (exchange if ranks > 1 else "direct"), of
    if exchange == "hierarchical":
        assert {peer % ranks for peer in carried} == {rank % ranks}, of


@nics
@several
@both
@pytest.mark.parametrize("accelerator", ["hopper", "cuda"])
@pytest.mark.parametrize("exchange", ["direct", "hierarchical"])
def test_the_bytes_of_experts_are_the_planned_ones(
    exchange: str, accelerator: str, nodes: int, ranks: int, route: str, nic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """They are so to every rank, whatever the routing: each token crosses once to each rank that wants
    it, or once to each node, and sums and weights of all tokens to each rank, or node."""
    take(route, monkeypatch)
    monkeypatch.setenv("MKERNEL_EXCHANGE", exchange)
    gated = [replace(each, activation=None, layout="row") for each in EXPERTS]
    found = launched(
        calls.decided, IN_PIECES, nodes_ranks.travelled, gated, nic=nic, nodes=nodes, ranks=ranks,
        accelerator=accelerator,
    )  # fmt: skip
    for rank, of_rank in enumerate(found):
        assert {op for op, *_ in of_rank} == set(MOE) - {"moe_dispatch"}
        for op, *sent in of_rank:
            check_bytes(rank, ranks, exchange, *sent, of=op)


@nics
@worlds
@both
@pytest.mark.parametrize("way", ["kernel", "parts"])
@pytest.mark.parametrize("exchange", ["direct", "hierarchical"])
def test_the_bytes_of_keys_are_the_planned_ones(
    exchange: str, way: str, nodes: int, ranks: int, route: str, nic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """They are so to every rank, in chunks of any size: what a rank, or a node, sees crosses once."""
    take(route, monkeypatch)
    monkeypatch.setenv("MKERNEL_EXCHANGE", exchange)
    shapes = [replace(shape, way=way) for shape in BY_KERNEL]
    if way == "parts":
        shapes += [replace(shape, way=way) for shape in ATTENTION]
    world = {"nic": nic, "nodes": nodes, "ranks": ranks}
    chunked = attention_ranks.in_chunks, shapes, nodes_ranks.attended
    found = launched(nodes_ranks.attended, shapes, **world)
    found += launched(*chunked, **world, fresh=True)
    for rank, of_rank in enumerate(found):
        for failures, *sent in of_rank:
            assert failures == []
            check_bytes(rank, ranks, exchange, *sent)


@nics
@several
@both
@pytest.mark.parametrize("way", ["kernel", "parts"])
def test_faults_of_keys_that_cross_are_seen(
    way: str, nodes: int, ranks: int, route: str, nic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the call before cross, or none yet; and the kernel leaves the first part out."""
    take(route, monkeypatch)
    names = ("stale", "early flag", *(("skipped",) if way == "kernel" else ()))
    faults = [f"{way}: {name}" for name in names]
    found = launched(
        attention_ranks.in_chunks, [replace(BY_KERNEL[0], way=way)], calls.faulty, faults,
        attention_ranks.planted, nic=nic, nodes=nodes, ranks=ranks, fresh=True,
    )  # fmt: skip
    assert {fault for each in found for fault in each} == set(faults)


@nics
@several
@both
def test_faults_of_tokens_that_cross_are_seen(
    nodes: int, ranks: int, route: str, nic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(route, monkeypatch)
    faults = moe_ranks.CROSSING_FAULTS
    found = launched(
        calls.decided, IN_PIECES, moe_ranks.relaying, EXPERTS[1:2], calls.faulty, faults,
        moe_ranks.planted, nic=nic, nodes=nodes, ranks=ranks,
    )  # fmt: skip
    assert [set(each) for each in found] == [set(faults)] * len(found)


@nics
@both
@takes_ranks(4)
def test_faults_of_sums_that_are_relayed_are_seen(
    route: str, nic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(route, monkeypatch)
    faults = moe_ranks.RELAYED_FAULTS
    found = launched(
        calls.decided, IN_PIECES, moe_ranks.relaying, EXPERTS[1:2], calls.faulty, faults,
        moe_ranks.planted, nic=nic, nodes=2, ranks=2,
    )  # fmt: skip
    assert [set(each) for each in found] == [set(faults)] * len(found)


@nics
@several
def test_too_many_rows_are_refused_across_relays_and_the_world_goes_on(
    nodes: int, ranks: int, nic: str
) -> None:
    """Outputs are zeros then, and combined tokens NaN, also in a replayed graph."""
    shape = Moe(40, 64, 64, 2, 2)
    none_failed(
        launched(
            calls.decided, {"moe.tuning": {"piece_rows": 7}}, moe_ranks.relaying, shape,
            moe_ranks.overflowed, nic=nic, nodes=nodes, ranks=ranks,
        )
    )  # fmt: skip


@pytest.mark.alone
@several
@pytest.mark.parametrize("pieces", [16, 1])
def test_the_last_token_leaves_when_the_first_tile_has_been_multiplied(
    pieces: int, nodes: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a NIC that takes seconds for all tokens, which leave one behind the other, not half of the
    pieces have come by then, and relays pass each on. As one piece all tokens come first. Tiles of own
    rows alone, which would show nothing, are left out."""
    monkeypatch.setenv("MKERNEL_SOFTVERBS_BANDWIDTH_MBPS", "1")
    shape = Moe(800, 512, 256, 4, 2, capacity=4 * 800 * 2)
    tuned = {"moe.tuning": {"piece_rows": 800 // pieces, "early_tiles": 0}}
    found = launched(
        calls.decided, tuned, moe_ranks.relaying, shape, nodes_ranks.overlapped, nic="cx7", nodes=nodes,
        ranks=ranks, fresh=True,
    )  # fmt: skip
    for came, whole in found:
        assert whole % pieces == 0
        assert came < whole / 2 if pieces > 1 else came == whole


@nics
@several
@both
def test_no_token_lands_in_a_later_call(
    nodes: int, ranks: int, route: str, nic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(route, monkeypatch)
    none_failed(
        launched(
            calls.decided, IN_PIECES, moe_ranks.relaying, EXPERTS[1], moe_ranks.late_tokens,
            nic=nic, nodes=nodes, ranks=ranks,
        )
    )  # fmt: skip


@nics
@pytest.mark.parametrize(
    ("shape", "route"),
    [
        pytest.param(ATTENTION[2], "direct", marks=DIRECT),
        (ATTENTION[2], "staged"),
        (EXPERTS[1], "staged"),
    ],
)
def test_what_crosses_does_so_once_for_each_rank_of_another_node(
    shape: Any, route: str, nic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values that are seen; tokens, ids, weights and sums: to the byte. Scrambled on their
    way, they give other results."""
    take(route, monkeypatch)
    for mask in (0, nodes_ranks.MASK):
        monkeypatch.setenv("MKERNEL_SOFTVERBS_SCRAMBLE", str(mask))
        for failures, put, expected, on_host in launched(nodes_ranks.crossed, shape, nic=nic):
            assert bool(failures) == bool(mask)
            assert put == expected
            assert (on_host > 0) == (route == "staged")
