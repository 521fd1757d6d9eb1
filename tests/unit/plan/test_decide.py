from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
from plan_worlds import CAPABILITIES, explained, world
from shipped import constants_of

from mkernel.errors import ArgumentError, Unsupported
from mkernel.plan.missing import WhatIf
from mkernel.plan.model import LaunchPlan, MoeShape
from mkernel.plan.pipeline import Runs
from mkernel.plan.planner import Planned
from mkernel.plan.simulate import simulate
from mkernel.plan.standard import GAIN, RowSchedule, TileSchedule, by_rows, by_tiles, choose
from mkernel.plan.traffic import relay_bytes

CONSTANTS = constants_of("ascend")


def considered(nodes: int = 4, ranks: int = 4, **options: Any) -> Planned:
    sizes = {"m": 16384, "n": 1024, "k": 4096}
    return explained("all_gather_gemm", sizes, nodes, ranks, **options)


def test_the_default_stays_unless_something_is_clearly_faster() -> None:
    times = {"default": 100.0, "a bit faster": 100 * (1 - GAIN / 2), "slower": 120.0}
    chosen, listed = choose("x", list(times), times.__getitem__)
    assert chosen == "default"
    assert [(one.option, one.predicted_us, one.chosen) for one in listed] == [
        (name, time, name == "default") for name, time in times.items()
    ]
    times["fast"] = 50.0
    assert choose("x", list(times), times.__getitem__)[0] == "fast"


def test_one_option_is_no_choice() -> None:
    assert choose("x", ["only"], lambda _: 1.0) == ("only", ())


RELAYING = CAPABILITIES.model_copy(update={"hierarchical_ops": ("all_gather_gemm",)})
"""Of a backend that exchanges either way."""


def test_exchange_is_chosen_where_the_backend_runs_both() -> None:
    only = considered()
    assert only.pipeline.exchange == "direct"
    assert not any(one.decision == "exchange" for one in only.alternatives)
    both = considered(capabilities=RELAYING)
    assert isinstance(both.plan, LaunchPlan)
    assert both.pipeline.exchange == "hierarchical"
    assert both.plan.prediction.comm_us < only.plan.prediction.comm_us / 2
    asked = considered(exchange="hierarchical")
    assert isinstance(asked.plan, WhatIf)
    assert asked.plan.prediction == both.plan.prediction
    direct = considered(capabilities=RELAYING, exchange="direct")
    assert direct.plan == only.plan
    one_node = considered(1, 4, capabilities=RELAYING, nic=None, verbs=None)
    assert one_node.pipeline.exchange == "direct"


def test_one_rank_a_node_has_nobody_to_share_with() -> None:
    for wanted in ("auto", "hierarchical"):
        found = considered(4, 1, capabilities=RELAYING, exchange=wanted)
        assert found.pipeline.exchange == "direct"
        assert not any(one.decision == "exchange" for one in found.alternatives)


def test_where_the_fabric_is_slow_direct_exchange_stays() -> None:
    slow = CONSTANTS.model_copy(update={"p2p_gbs": 1.0})
    found = considered(capabilities=RELAYING, constants=slow)
    assert found.pipeline.exchange == "direct"
    assert sum(one.decision == "exchange" for one in found.alternatives) == 2


MOE = CAPABILITIES.model_copy(update={"ops": ("moe_dispatch_gemm",)})


TOKENS = {"tokens": 4096, "hidden": 4096, "features": 256, "experts": 32, "top_k": 8}
RELAYING_TOKENS = MOE.model_copy(update={"hierarchical_ops": ("moe_dispatch_gemm",)})


def test_tokens_cross_once_to_a_node_where_that_is_faster() -> None:
    """The rail's bytes are then those of tokens that some rank of the node wants."""
    direct = explained("moe_dispatch_gemm", TOKENS, 4, 4, capabilities=MOE)
    assert direct.pipeline.exchange == "direct"
    assert not any(one.decision == "exchange" for one in direct.alternatives)
    both = explained("moe_dispatch_gemm", TOKENS, 4, 4, capabilities=RELAYING_TOKENS)
    assert both.pipeline.exchange == "hierarchical"
    assert both.plan.prediction.comm_us < direct.plan.prediction.comm_us / 1.8
    asked = explained("moe_dispatch_gemm", TOKENS, 4, 4, capabilities=MOE, exchange="hierarchical")
    assert isinstance(asked.plan, WhatIf)
    slow = CONSTANTS.model_copy(update={"p2p_gbs": 1.0})
    found = explained(
        "moe_dispatch_gemm", TOKENS, 4, 4, capabilities=RELAYING_TOKENS, constants=slow
    )
    assert found.pipeline.exchange == "direct"


def test_gradients_of_experts_are_exchanged_directly() -> None:
    claims = CAPABILITIES.model_copy(update={"ops": ("moe_dispatch_backward",)})
    found = explained(
        "moe_dispatch_backward", TOKENS, 4, 4, capabilities=claims, exchange="hierarchical"
    )
    assert found.pipeline.exchange == "direct"


def test_relays_have_memory_for_whatever_the_routing_is() -> None:
    """(nodes - 1) x tokens x row; a world whose devices have less does without them."""
    shape = MoeShape(**TOKENS)
    nbytes = relay_bytes("moe_dispatch_gemm", shape, "float16", 4)
    assert nbytes == 3 * 4096 * 4096 * 2
    topology = world(4, 4)

    def found(memory_bytes: int, exchange: str) -> Planned:
        nodes = [
            one.model_copy(update={"accelerators": tuple(
                each.model_copy(update={"memory_bytes": memory_bytes}) for each in one.accelerators
            )})
            for one in topology.nodes
        ]  # fmt: skip
        made: Planned = explained(
            "moe_dispatch_gemm", TOKENS, 4, 4, capabilities=RELAYING_TOKENS, exchange=exchange,
            topology=topology.model_copy(update={"nodes": tuple(nodes)}),
        )  # fmt: skip
        return made

    for exchange in ("auto", "hierarchical"):
        assert found(nbytes, exchange).pipeline.exchange == "hierarchical"
    assert found(nbytes - 1, "auto").pipeline.exchange == "direct"
    with pytest.raises(Unsupported, match=f"keeps {nbytes} bytes of rows that it relays"):
        found(nbytes - 1, "hierarchical")


COMBINE = CAPABILITIES.model_copy(update={"ops": ("moe_gemm_combine",)})


@pytest.mark.parametrize("constants", [CONSTANTS, None])
def test_results_come_home_between_nodes_as_the_backend_brings_them(constants: object) -> None:
    sizes = {"tokens": 64, "hidden": 64, "features": 64, "experts": 4, "top_k": 1}

    def found(nodes: int, far: tuple[str, ...], **wish: str) -> Planned:
        claims = COMBINE.model_copy(update={"far_returns": far})
        made: Planned = explained(
            "moe_gemm_combine", {**sizes, **wish}, nodes, 2, capabilities=claims,
            constants=constants,
        )  # fmt: skip
        return made

    assert found(2, ("slots", "ranks")).pipeline.returns == "slots"
    assert found(2, ("ranks",)).pipeline.returns == "ranks"
    assert found(1, ("ranks",)).pipeline.returns == "slots"
    assert isinstance(found(1, ("ranks",), returns="slots").plan, LaunchPlan)
    refused = found(2, ("ranks",), returns="slots").plan
    assert isinstance(refused, WhatIf)
    assert refused.missing == (
        "accelerator 'ascend' brings results home by ranks between nodes, not by slots; leave "
        "returns open",
    )


def test_rows_of_a_chunk() -> None:
    sizes = {"tokens": 510, "hidden": 512, "features": 256, "experts": 32, "top_k": 4}
    for chunk, rows in ((None, 128), (100, 100), (1000, 510)):
        found = explained("moe_dispatch_gemm", sizes, 1, 4, capabilities=MOE, chunk=chunk)
        assert found.plan.part(RowSchedule).rows_per_chunk == rows
        assert found.pipeline.rows_per_chunk == rows


def test_dear_signals_make_chunks_larger() -> None:
    dear = CONSTANTS.model_copy(update={"signal_us": 400.0})
    cheap, costly = (
        considered(constants=c, nodes=1).plan.part(TileSchedule).chunking for c in (CONSTANTS, dear)
    )
    assert costly.tiles_per_chunk > cheap.tiles_per_chunk
    given = considered(constants=dear, nodes=1, chunk=2)
    assert given.plan.part(TileSchedule).chunking.tiles_per_chunk == 2
    assert not any(one.decision == "chunk" for one in given.alternatives)


def test_slow_blocks_are_given_company() -> None:
    slow = CONSTANTS.model_copy(update={"comm_block_gbs": 1.0})
    usual, more = (considered(1, 4, constants=c).pipeline for c in (CONSTANTS, slow))
    assert (usual.comm_blocks, more.comm_blocks) == (12, 48)
    assert considered(1, 4, constants=slow, comm_blocks=3).pipeline.comm_blocks == 3


def test_every_decision_has_one_choice() -> None:
    found = considered(capabilities=RELAYING)
    for decision in {one.decision for one in found.alternatives}:
        options = [one for one in found.alternatives if one.decision == decision]
        assert sum(one.chosen for one in options) == 1
        assert len({one.option for one in options}) == len(options)
    last = [one for one in found.alternatives if one.chosen and "simulated" not in one.why][-1]
    assert last.predicted_us == pytest.approx(found.plan.prediction.pipelined_us)


def test_an_exchange_that_nobody_knows() -> None:
    with pytest.raises(ArgumentError, match="one of: auto, direct, hierarchical"):
        considered(exchange="tree")


# ---- by simulation ---------------------------------------------------------------------------------

EVERY_OP = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
OF_A_GPU = CAPABILITIES.model_copy(update={"ops": EVERY_OP, "compute_cores": 132, "comm_cores": 1})
BY_ROWS: dict[str, Any] = {
    "capabilities": OF_A_GPU, "schedule": partial(by_rows, one_kernel_per_chunk=True)
}  # fmt: skip
IN_ANY_ORDER = partial(by_tiles, orders=get_args(Runs))
GPU = constants_of("hopper").model_copy(update={"fused": None, "library": None})


def simulated(
    op: str, m: int, n: int, k: int, nodes: int, ranks: int, **options: Any
) -> tuple[Planned, dict[str, dict[str, float]]]:
    """What is planned, and by decision the time of each option."""
    every = CAPABILITIES.model_copy(update={"ops": EVERY_OP})
    usual = {"capabilities": every, "schedule": IN_ANY_ORDER}
    found = explained(op, {"m": m, "n": n, "k": k}, nodes, ranks, **{**usual, **options})
    times: dict[str, dict[str, float]] = {}
    for one in found.alternatives:
        if "simulated" in one.why:
            assert one.predicted_us is not None
            times.setdefault(one.decision, {})[one.option] = one.predicted_us
    return found, times


@pytest.mark.parametrize(
    ("op", "m", "n", "k", "nic_gbs", "runs"),
    [
        ("gemm_reduce_scatter", 4096, 4096, 1024, 25.0, "node"),  # all of it is communication
        ("gemm_reduce_scatter", 4096, 4096, 16384, 25.0, "far"),  # NICs must not wait for partials
        ("gemm_reduce_scatter", 4096, 4096, 65536, 25.0, "node"),  # all of it is compute
        ("all_gather_gemm", 4096, 4096, 4096, 100.0, "rail"),  # both links are as slow
        ("all_gather_gemm", 4096, 4096, 4096, 400.0, "far"),  # the fabric is the slow one
    ],
)
def test_the_order_is_the_one_that_waits_least(
    op: str, m: int, n: int, k: int, nic_gbs: float, runs: str
) -> None:
    constants = CONSTANTS.model_copy(update={"nic_gbs": nic_gbs})
    if op == "all_gather_gemm":
        constants = constants.model_copy(update={"p2p_gbs": 10.0})
    found, times = simulated(op, m, n, k, 2, 4, constants=constants)
    assert found.plan.part(TileSchedule).order == found.pipeline.order.runs == runs
    assert list(times["order"]) == ["node", "far", "rail"]
    best = min(times["order"].values())
    assert times["order"][runs] <= best / (1 - GAIN)
    if runs != "node":
        assert times["order"][runs] == best < (1 - GAIN) * times["order"]["node"]


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 4), (4, 1)])
def test_one_order_is_no_choice(nodes: int, ranks: int) -> None:
    assert simulated("all_gather_gemm", 4096, 4096, 4096, nodes, ranks)[1] == {}


def test_an_order_that_the_backend_lacks_is_not_chosen() -> None:
    orders: tuple[tuple[Runs, ...], ...] = (("node",), ("rail",))
    for one in orders:
        found, times = simulated(
            "gemm_reduce_scatter", 4096, 4096, 16384, 2, 4, schedule=partial(by_tiles, orders=one)
        )
        assert (found.plan.part(TileSchedule).order, times) == (one[0], {})


def test_a_chunk_that_is_a_kernel_fills_the_device() -> None:
    """512 rows of 2048 columns are 32 tiles: as long on 132 cores as the 128 tiles of 2048 rows."""
    found, times = simulated("all_gather_gemm", 8192, 2048, 8192, 1, 4, constants=GPU, **BY_ROWS)
    assert found.pipeline.rows_per_chunk == 2048
    assert times["chunk"]["512 rows"] > 3 * times["chunk"]["2048 rows"]
    tile = 2 * 128 * 256 * 8192 / (GPU.float16_tflops_per_core * 1e6)
    waves = [(found.pipeline, 4), (replace(found.pipeline, rows_per_chunk=512), 13)]
    quick = GPU.model_copy(update={"egress_gbs": None, "p2p_gbs": 1e9, "copy_engine_gbs": 1e9})
    for pipeline, count in waves:
        took = simulate(found.plan, pipeline, quick)
        whole = found.plan.prediction.compute_us / 4  # by rate alone; a wave leaves 4 cores idle
        assert tile == pytest.approx(whole * 132 / 128)
        assert took.time_us - GPU.launch_us == pytest.approx(count * whole, rel=0.05)


def test_large_chunks_are_cut_to_overlap() -> None:
    """Where a chunk of any size fills the device, the first one should come early."""
    found, times = simulated("all_gather_gemm", 65536, 8192, 8192, 1, 4, **BY_ROWS)
    cut = times["chunk"]
    assert min(cut, key=cut.__getitem__) == f"{found.pipeline.rows_per_chunk} rows"
    assert min(cut.values()) < 0.97 * cut["16384 rows"]


def test_chunks_that_gain_nothing_stay_whole() -> None:
    """A kernel a chunk: where the product is long, smaller chunks only start more of them."""
    found, times = simulated("all_gather_gemm", 16384, 4096, 16384, 1, 2, constants=GPU, **BY_ROWS)
    assert found.pipeline.rows_per_chunk == 8192
    assert times["chunk"]["4096 rows"] > 0.97 * times["chunk"]["8192 rows"]


def test_who_wants_one_chunk_gets_one() -> None:
    found, times = simulated(
        "all_gather_gemm", 8192, 256, 8192, 1, 4, schedule=partial(by_rows, chunks=1)
    )
    assert found.pipeline.rows_per_chunk == 2048
    assert times == {}


def test_a_chunk_that_is_given_is_not_chosen() -> None:
    found, times = simulated("all_gather_gemm", 8192, 256, 64, 1, 4, chunk=7, **BY_ROWS)
    assert (found.pipeline.rows_per_chunk, times) == (7, {})
