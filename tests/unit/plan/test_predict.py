"""Work and bytes of each op, counted by hand; and that predictions are made of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import get_args

import devices
import pytest
from gpu_plans import gpu_plan
from plan_worlds import CAPABILITIES, explained, main_job, world
from shipped import constants_of

from mkernel.backends import registry
from mkernel.backends.accelerators.streams.backend import StreamsAccelerator
from mkernel.plan.arguments import Around
from mkernel.plan.model import (
    E4M3,
    AttentionShape,
    CombineShape,
    GemmCombineShape,
    GemmShape,
    LaunchPlan,
    MoeShape,
    Prediction,
    Scales,
    Shape,
)
from mkernel.plan.ops import OpName
from mkernel.plan.paths import FLOAT32_PARTIALS
from mkernel.plan.pipeline import Exchange
from mkernel.plan.planner import Planned, explain, plan
from mkernel.plan.predict import Payloads, messages_us, payloads, predict, work
from mkernel.plan.simulate import simulate
from mkernel.topology.routes import SharedLinks
from mkernel.topology.world_map import world_map
from mkernel.world.statistics import sent

W = 4
BOTH = 1 - (6 * 5) / (8 * 7)
"""The share of tokens that one of four ranks wants, of which each has two of eight experts."""


COMBINED = GemmCombineShape(
    tokens=32, hidden=24, features=40, experts=8, top_k=2, partial_dtype="float32"
)


def attention(*, causal: bool) -> AttentionShape:
    return AttentionShape(batch=3, heads=10, kv_heads=2, sequence=64, head_dim=7, causal=causal)


def pairs_that_meet(shape: AttentionShape) -> float:
    """Queries and keys of the whole sequence; causal: those below the diagonal, and half of it."""
    if not shape.causal:
        return float(shape.sequence**2)
    return sum(query + 0.5 for query in range(shape.sequence))


@pytest.mark.parametrize("causal", [False, True])
def test_work_of_attention_is_of_the_pairs_that_meet(causal: bool) -> None:
    """Two products of ``head_dim`` multiply-adds for each pair and head; a rank has its share."""
    shape = attention(causal=causal)
    heads = shape.batch * shape.heads
    assert work(shape, W) == 2 * 2 * shape.head_dim * heads * pairs_that_meet(shape) / W


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [("float16", 2), ("float32", 4)])
def test_attention_sends_its_own_k_and_v(causal: bool, dtype: str, size: int) -> None:
    """Causal or not: zigzag gives every rank positions that some query of every other one sees."""
    shape = attention(causal=causal)
    elements = shape.batch * shape.kv_heads * (shape.sequence // W) * shape.head_dim  # of k alone
    found = payloads("ring_attention", shape, dtype, W)  # type: ignore[arg-type]
    assert found == Payloads(gather=2 * elements * size)


@pytest.mark.parametrize(
    ("op", "shape", "flops", "sent"),
    [
        ("all_gather_gemm", GemmShape(m=64, n=24, k=40), 2 * 64 * 24 * 40, (16 * 40 * 2, 0, 0)),
        ("gemm_reduce_scatter", GemmShape(m=64, n=24, k=40), 2 * 64 * 24 * 40, (0, 16 * 24 * 2, 0)),
        ("gemm_all_reduce", GemmShape(m=64, n=24, k=40), 2 * 64 * 24 * 40, (0, 768, 768)),
        (
            "moe_dispatch_gemm", MoeShape(tokens=32, hidden=24, features=40, experts=8, top_k=2),
            2 * 32 * 2 * 24 * 40, (32 * BOTH * 24 * 2, 0, 0),
        ),
        (
            "moe_combine", CombineShape(tokens=32, features=40, experts=8, top_k=2),
            2 * 32 * 2 * 40, (32 * 2 // W * 40 * 2, 0, 0),
        ),
        ("moe_gemm_combine", COMBINED, 2 * 32 * 2 * 24 * 40, (32 * 2 // W * 24 * 4, 0, 0)),
    ],
)  # fmt: skip
def test_work_and_bytes_of_the_other_ops(
    op: OpName, shape: Shape, flops: float, sent: tuple[float, float, float]
) -> None:
    assert work(shape, W) == flops
    assert payloads(op, shape, "float16", W) == sent


@pytest.mark.parametrize(("nodes", "ranks", "sends"), [(1, 1, False), (1, 2, True), (2, 1, True)])
def test_more_ranks_than_one_send(nodes: int, ranks: int, sends: bool) -> None:
    for op in ("all_gather_gemm", "gemm_reduce_scatter"):  # the second in closed form
        claims = CAPABILITIES.model_copy(update={"ops": (op,)})
        times = main_job(nodes, ranks, op=op, capabilities=claims).plan.prediction
        assert times is not None
        assert (times.comm_us > 0) == sends


def test_a_causal_call_is_predicted_to_compute_half_and_send_all() -> None:
    claims = CAPABILITIES.model_copy(update={"ops": ("ring_attention",)})
    sizes = {"batch": 2, "heads": 32, "kv_heads": 8, "sequence": 1 << 16, "head_dim": 128}
    times = []
    for causal in (False, True):
        made = plan(
            "ring_attention", {**sizes, "causal": causal}, dtype="float16",
            world=world_map(world(2, 2), 2, constants_of("ascend")),
            accelerator="ascend", capabilities=claims, nic="cx7", verbs="soft",
        )  # fmt: skip
        assert made.prediction is not None
        times.append(made.prediction)
    assert times[1].compute_us == pytest.approx(times[0].compute_us / 2)
    assert times[1].comm_us == pytest.approx(times[0].comm_us)


@pytest.mark.parametrize(
    ("op", "shape", "more"),
    [
        ("ring_attention", attention(causal=False), 2.5),
        ("moe_dispatch", MoeShape(tokens=32, hidden=24, features=40, experts=8, top_k=2), 2.0),
        ("moe_gemm_combine", COMBINED, 2.0),
    ],
)
def test_gradients_are_more_work(op: str, shape: Shape, more: float) -> None:
    sizes = shape.model_dump(exclude={"kind", "head_dim"})
    if "heads" in sizes:
        sizes["head_dim"] = 8
    times = []
    for name in ("moe_dispatch_gemm" if op == "moe_dispatch" else op, f"{op}_backward"):
        claims = CAPABILITIES.model_copy(update={"ops": (name,)})
        made = plan(
            name, sizes, dtype="float16", world=world_map(world(2, 2), 2, constants_of("ascend")),
            accelerator="ascend", capabilities=claims, nic="cx7", verbs="soft",
        )  # fmt: skip
        assert made.prediction is not None
        times.append(made.prediction.compute_us)
    assert times[1] == pytest.approx(more * times[0])


def test_sums_of_ranks_come_home_once_for_each_token_and_rank_that_has_experts_of_it() -> None:
    sent = payloads("moe_gemm_combine", COMBINED, "float16", W, "ranks")
    assert sent == Payloads(gather=32 * BOTH * 24 * 4)


@pytest.mark.parametrize(
    ("experts", "top_k", "world"), [(8, 2, 4), (8, 3, 2), (6, 6, 3), (4, 1, 4)]
)
def test_a_token_travels_once_to_a_rank_that_has_experts_of_it(
    experts: int, top_k: int, world: int
) -> None:
    """Counted over all choices of different experts; never more than all tokens, whatever top_k is."""
    shape = MoeShape(tokens=32, hidden=24, features=40, experts=experts, top_k=top_k)
    chosen = list(combinations(range(experts), top_k))
    own = experts // world  # those of the rank at hand: the first ones
    share = sum(each[0] < own for each in chosen) / len(chosen)
    found = payloads("moe_dispatch_gemm", shape, "float16", world)
    assert found.gather == pytest.approx(32 * share * 24 * 2)
    whole = payloads("moe_dispatch_gemm", shape, "float16", world, whole_tokens=True)
    assert whole == Payloads(gather=32 * 24 * 2)
    assert found.gather <= whole.gather


@pytest.mark.parametrize("accelerator", ["hopper", "streams"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_dispatch_is_predicted_as_its_tokens_travel(
    accelerator: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And reported so."""
    backend = registry.accelerator(accelerator)
    if accelerator == "hopper":
        monkeypatch.setenv("MKERNEL_HOPPER_TOKENS", "whole" if whole else "wanted")
    gpus = tuple(devices.gpu(i, name="NVIDIA H200") for i in range(2))
    claims = backend.capabilities_on(gpus[0])
    dear = {"signal_us": 1e6 if whole else 0.0, "launch_us": 0.0, "architectures": ()}
    assert claims.constants is not None
    constants = claims.constants.model_copy(update=dear)
    where = world_map(devices.world(devices.node(gpus)), 2, constants, group=claims.process_group)
    found = explain(
        "moe_dispatch_gemm",
        {"tokens": 8192, "hidden": 4096, "features": 256, "experts": 64, "top_k": 1},
        dtype="bfloat16", accelerator=accelerator, capabilities=claims, nic=None, verbs=None,
        schedule=backend.schedule, world=where,
    )  # fmt: skip
    made = found.plan
    assert isinstance(made, LaunchPlan)
    assert made.schedule is not None
    assert made.schedule.whole_tokens == found.pipeline.whole_tokens == whole
    nbytes = 8192 * 4096 * 2 * (1 if whole else 0.5) + 8192 * 4  # and ids
    assert sum(sent(made, 0).values()) == nbytes
    assert made.prediction is not None
    links = where.group_links if claims.process_group else where.links
    assert made.prediction.comm_us == messages_us(nbytes, links, found.pipeline, constants)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize(
    ("op", "sizes", "schedule", "elements"),
    [
        ("gemm_all_reduce", {"m": 16, "n": 8192, "k": 512}, "hopper.few_rows", 1.0),
        ("gemm_all_reduce", {"m": 16, "n": 512, "k": 512}, "hopper.library", 1.0),
        ("all_reduce", {"m": 16, "n": 512}, "hopper.all_reduce", 1.0),
        ("gemm_all_reduce", {"m": 8192, "n": 8192, "k": 512}, None, 2.0),
    ],
)
def test_what_an_all_reduce_sends_is_reported_as_it_is_sent(
    world: int, op: str, sizes: dict[str, int], schedule: str | None, elements: float
) -> None:
    """In one exchange all of its partial results, in their dtype, to each peer; else a share of them
    and of the sums."""
    options = {"path": "fused"} if schedule == "hopper.few_rows" else {}
    backend = registry.accelerator("hopper")
    made = gpu_plan(backend, op, world, sizes, dtype="bfloat16", **options)
    assert made.schedule is not None
    whole = sizes["m"] * sizes["n"]
    if schedule is None:
        assert sum(sent(made, 0).values()) == (world - 1) * whole / world * elements * 2
        return
    assert made.schedule.kind == schedule
    assert made.schedule.one_exchange
    small = op != "all_reduce" and whole <= FLOAT32_PARTIALS
    assert sum(sent(made, 0).values()) == (world - 1) * whole * (4 if small else 2)


def test_gradients_of_what_came_go_home_in_float32() -> None:
    shape = attention(causal=True)
    elements = shape.batch * shape.kv_heads * (shape.sequence // W) * shape.head_dim  # of k alone
    for dtype, size in (("float16", 2), ("float32", 4)):
        found = payloads("ring_attention_backward", shape, dtype, W)  # type: ignore[arg-type]
        assert found == Payloads(gather=2 * elements * (size + 4))
    moe = MoeShape(tokens=32, hidden=24, features=40, experts=8, top_k=2)
    found = payloads("moe_dispatch_backward", moe, "float16", W)
    assert found == Payloads(gather=32 * BOTH * 24 * (2 + 4))


def test_a_rate_that_is_not_known_of_e4m3_is_named_and_one_that_is_counts() -> None:
    claims = CAPABILITIES.model_copy(update={"scale_modes": ("row",)})
    own = constants_of("ascend")
    known = own.model_copy(update={"float8_tflops_per_core": 2 * own.float32_tflops_per_core})
    found = []
    for dtype, constants in (("float32", own), (E4M3, own), (E4M3, known)):
        scales = Scales(mode="row") if dtype == E4M3 else None
        made = plan(
            "all_gather_gemm", {"m": 4096, "n": 4096, "k": 4096}, dtype=dtype,
            out_dtype="bfloat16" if scales else None, b_layout="column",
            around=Around(scales=scales), world=world_map(world(2, 2), 2, constants),
            accelerator="ascend", capabilities=claims, nic="cx7", verbs="soft",
        )  # fmt: skip
        assert made.prediction is not None
        found.append(made.prediction)
    float32, unknown, measured = found
    assert unknown.compute_us == float32.compute_us
    assert measured.compute_us == pytest.approx(unknown.compute_us / 2)
    named = "with the rate of float32 for that of float8_e4m3fn, which is unknown"
    assert [named in each.constants for each in found] == [False, True, False]


# ---- times, by the docstrings' formulae, of a machine whose constants are round numbers ----------

ROUND = constants_of("ascend").model_copy(
    update={
        "float16_tflops_per_core": 1.0,
        "memory_gbs": 1e9,
        "p2p_gbs": 1000.0,
        "p2p_latency_us": 0.0,
        "nic_gbs": 1000.0,
        "nic_most_gbs": 1000.0,
        "nic_latency_us": 0.0,
        "comm_block_gbs": 1000.0,
        "signal_us": 0.0,
        "launch_us": 0.0,
    }
)


def times_of(made: Planned, **constants: float) -> Prediction:
    there = ROUND.model_copy(update=constants)
    links = SharedLinks(made.plan.routes, made.plan.placement)
    return predict(made.plan, links, made.pipeline, there)


@pytest.mark.parametrize("late_us", [0.0, 20.0, 60.0, 500.0])
def test_what_a_gather_exposes_is_what_local_rows_do_not_cover(late_us: float) -> None:
    """Four waves on each of two ranks: half of the compute is of the rank's own rows, and the other's
    only chunk comes within it, or so much later."""
    constants = ROUND.model_copy(update={"p2p_latency_us": late_us})
    made = main_job(1, 2, m=512, n=24 * 256, k=256, constants=constants)
    found = times_of(made, p2p_latency_us=late_us)
    cut = made.pipeline.chunking
    assert cut is not None
    assert (cut.chunks_per_rank, made.pipeline.compute_blocks) == (1, 24)
    tile_us = 2 * cut.tile_m * cut.tile_n * 256 / 1e6
    compute_us = 4 * tile_us
    assert found.compute_us == pytest.approx(compute_us)
    exposed = max(0.0, found.comm_us - compute_us / 2)
    wanted = max(compute_us + exposed, found.comm_us + tile_us)
    assert found.pipelined_us == pytest.approx(wanted)
    assert found.sequential_us == pytest.approx(compute_us + found.comm_us)


def test_a_gather_whose_first_chunk_comes_in_time_exposes_nothing() -> None:
    """The others take longer than local rows, and come while that one is worked on."""
    constants = ROUND.model_copy(update={"p2p_gbs": 2.5})
    made = main_job(1, 2, m=8192, n=24 * 256, k=256, constants=constants)
    found = times_of(made, p2p_gbs=2.5)
    cut = made.pipeline.chunking
    assert cut is not None
    assert cut.chunks_per_rank == 8
    assert found.comm_us / 8 < found.compute_us / 2 < found.comm_us < 0.9 * found.compute_us
    assert found.pipelined_us == pytest.approx(found.compute_us)


def test_blocks_are_shared_by_neighbours_and_all_other_nodes_together() -> None:
    """Two nodes of three ranks: a rank's blocks serve two neighbours and the other node, which gets
    three ranks' bytes and a signal with each. Their time is what a message costs, and that the
    simulation gives."""
    slow = {"comm_block_gbs": 0.25, "signal_us": 7.0}
    constants = ROUND.model_copy(update=slow)
    made = main_job(2, 3, m=6 * 128, n=256, k=256, comm_blocks=12, constants=constants)
    assert made.pipeline.exchange == "direct"
    payload = 128 * 256 * 2
    blocks = 12 / 3
    wanted = 3 * payload / (blocks * 0.25e3) + 3 * 7.0 / blocks
    links = SharedLinks(made.plan.routes, made.plan.placement)
    assert messages_us(payload, links, made.pipeline, constants) == pytest.approx(wanted)
    assert times_of(made, **slow).comm_us == pytest.approx(wanted)
    simulated = simulate(made.plan, made.pipeline, constants)
    assert simulated.communication_us == pytest.approx(wanted, rel=1e-3)


def test_a_way_that_nothing_takes_costs_nothing() -> None:
    """Hierarchically all bytes stay on their rails: what crossing them takes does not count."""
    made = main_job(2, 2, m=512, n=256, k=2048, constants=ROUND)
    ways = tuple(
        way
        if way.within or way.src_local == way.dst_local
        else way.model_copy(update={"latency_us": 1e6})
        for way in made.plan.routes.classes
    )
    table = made.plan.routes.model_copy(update={"classes": ways})
    links = SharedLinks(table, made.plan.placement)
    took = [
        messages_us(1 << 20, links, replace(made.pipeline, exchange=exchange), ROUND)
        for exchange in get_args(Exchange)
    ]
    assert get_args(Exchange) == ("direct", "hierarchical")
    assert took[1] < 1e5
    assert took[0] > 1e6


def test_results_that_come_home_alike_come_by_slot_which_takes_no_weights_first() -> None:
    """With one expert a token both ways take the same bytes; by rank, weights go before."""
    claims = CAPABILITIES.model_copy(update={"ops": ("moe_gemm_combine",)})
    sizes = {"tokens": 64, "hidden": 64, "features": 64, "experts": 4, "top_k": 1}
    for signal_us in (0.5, 50.0):
        constants = ROUND.model_copy(update={"signal_us": signal_us})
        made = explained("moe_gemm_combine", sizes, 1, 2, capabilities=claims, constants=constants)
        assert made.pipeline.returns == "slots"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "op", ["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "all_reduce", "moe_combine"]
)
def test_messages_of_streams_cost_one_signal_each(kind: str, op: str) -> None:
    """A grouped message to all peers one in all, others one a peer: doubling the ranks of a node at
    most doubles what a small call's messages cost, in the closed form and simulated."""
    backend = StreamsAccelerator(kind)
    claims, group = backend.capabilities(), 1000.0
    constants = constants_of("streams-cuda" if kind == "cuda" else "streams").model_copy(
        update={"p2p_latency_us": 0.0, "group_latency_us": 0.0, "nic_latency_us": 0.0,
                "p2p_gbs": group, "group_gbs": group, "comm_block_gbs": group, "egress_gbs": None,
                "architectures": ()}
    )  # fmt: skip
    sizes = {"m": 64, "n": 64, "k": 64}
    if op == "moe_combine":
        sizes = {"tokens": 16, "features": 64, "experts": 16, "top_k": 1}
    elif op == "all_reduce":
        del sizes["k"]
    for each in (1, 2, 4, 8):
        nodes = tuple(
            devices.node(tuple(devices.gpu(i, kind=kind, numa_node=0) for i in range(each)))
            for _ in range(2)
        )
        found = explain(
            op, sizes, dtype="float32", accelerator="streams", capabilities=claims, nic=None,
            verbs=None, schedule=backend.schedule,
            world=world_map(devices.world(*nodes), each, constants, group=True),
        )  # fmt: skip
        plan = found.plan
        grouped = kind == "cuda" and op != "gemm_reduce_scatter"
        expected = constants.signal_us * (1 if grouped else 2 * each - 1)
        assert plan.prediction is not None
        assert plan.prediction.comm_us == pytest.approx(expected, rel=0.05)
        exchanges = 2 if op.endswith("all_reduce") else 1
        simulated = simulate(plan, found.pipeline, constants)
        computed = 0.0 if op in ("all_gather_gemm", "moe_combine") else simulated.compute_us
        waited = simulated.communication_us - computed
        assert waited == pytest.approx(exchanges * expected, rel=0.1)
