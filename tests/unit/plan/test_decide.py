from __future__ import annotations

from typing import Any, get_args

import pytest
from plan_worlds import CAPABILITIES, world

from mkernel.errors import ArgumentError, Unsupported
from mkernel.plan.decide import GAIN, choose
from mkernel.plan.model import Exchange
from mkernel.plan.planner import Planned, explain
from mkernel.topology.cost import default_constants

BOTH = CAPABILITIES.model_copy(update={"exchanges": get_args(Exchange)})
CONSTANTS = default_constants("ascend")


def considered(nodes: int = 4, ranks: int = 4, **options: Any) -> Planned:
    arguments: dict[str, Any] = {
        "dtype": "float16",
        "nodes": nodes,
        "ranks_per_node": ranks,
        "accelerator": "ascend",
        "capabilities": CAPABILITIES,
        "nic": "cx7",
        "verbs": "soft",
        "topology": world(nodes, ranks),
        **options,
    }
    return explain("all_gather_gemm", {"m": 16384, "n": 1024, "k": 4096}, **arguments)


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


def test_the_exchange_is_what_the_backend_provides_and_then_what_is_faster() -> None:
    only = considered()
    assert only.plan.exchange == "direct"
    assert not any(one.decision == "exchange" for one in only.alternatives)
    both = considered(capabilities=BOTH)
    assert both.plan.exchange == "hierarchical"
    assert both.plan.prediction.comm_us < only.plan.prediction.comm_us / 2
    forced = considered(capabilities=BOTH, exchange="direct").plan
    assert (forced.exchange, forced.prediction) == ("direct", only.plan.prediction)
    assert considered(1, 4, capabilities=BOTH, nic=None, verbs=None).plan.exchange == "direct"


def test_where_the_fabric_is_slow_direct_exchange_stays() -> None:
    slow = CONSTANTS.model_copy(update={"p2p_gbs": 1.0})
    assert considered(capabilities=BOTH, constants=slow).plan.exchange == "direct"


def test_experts_rows_are_shared_with_nobody() -> None:
    every = BOTH.model_copy(update={"ops": ("moe_dispatch_gemm",)})
    sizes = {"tokens": 512, "hidden": 512, "features": 256, "experts": 32, "top_k": 4}
    options: dict[str, Any] = {
        "dtype": "float16", "nodes": 4, "ranks_per_node": 4, "accelerator": "ascend",
        "capabilities": every, "nic": "cx7", "verbs": "soft", "topology": world(4, 4),
    }  # fmt: skip
    found = explain("moe_dispatch_gemm", sizes, **options)
    assert found.plan.exchange == "direct"
    assert not any(one.decision == "exchange" for one in found.alternatives)
    with pytest.raises(Unsupported, match="for 'moe_dispatch_gemm'; it provides: direct"):
        explain("moe_dispatch_gemm", sizes, exchange="hierarchical", **options)


def test_what_is_not_a_product_is_cut_by_rows_whatever_products_are_cut_by() -> None:
    every = BOTH.model_copy(update={"ops": ("moe_dispatch_gemm",)})
    assert every.chunk_unit == "tiles"
    sizes = {"tokens": 510, "hidden": 512, "features": 256, "experts": 32, "top_k": 4}
    options: dict[str, Any] = {
        "dtype": "float16", "nodes": 1, "ranks_per_node": 4, "accelerator": "ascend",
        "capabilities": every, "nic": None, "verbs": None, "topology": world(1, 4),
    }  # fmt: skip
    for chunk, rows in ((None, 128), (100, 100), (1000, 510)):
        plan = explain("moe_dispatch_gemm", sizes, chunk=chunk, **options).plan
        assert (plan.chunking, plan.rows_per_chunk) == (None, rows)


def test_dear_signals_make_chunks_larger() -> None:
    dear = CONSTANTS.model_copy(update={"signal_us": 400.0})
    cheap, costly = (considered(constants=c, nodes=1).plan for c in (CONSTANTS, dear))
    assert costly.chunking is not None
    assert cheap.chunking is not None
    assert costly.chunking.tiles_per_chunk > cheap.chunking.tiles_per_chunk
    given = considered(constants=dear, nodes=1, chunk=2)
    assert given.plan.chunking is not None
    assert given.plan.chunking.tiles_per_chunk == 2
    assert not any(one.decision == "chunk" for one in given.alternatives)


def test_slow_blocks_are_given_company() -> None:
    slow = CONSTANTS.model_copy(update={"comm_block_gbs": 1.0})
    usual, more = (considered(1, 4, constants=c).plan.resources for c in (CONSTANTS, slow))
    assert (usual.comm_blocks, more.comm_blocks) == (12, 48)
    assert considered(1, 4, constants=slow, comm_blocks=3).plan.resources.comm_blocks == 3


def test_every_decision_has_one_choice() -> None:
    found = considered(capabilities=BOTH)
    for decision in {one.decision for one in found.alternatives}:
        options = [one for one in found.alternatives if one.decision == decision]
        assert sum(one.chosen for one in options) == 1
        assert len({one.option for one in options}) == len(options)
    last = [one for one in found.alternatives if one.chosen][-1]
    assert last.predicted_us == pytest.approx(found.plan.prediction.pipelined_us)


@pytest.mark.parametrize(
    ("exchange", "error", "message"),
    [
        ("tree", ArgumentError, "one of: auto, direct, hierarchical"),
        ("hierarchical", Unsupported, "does not provide the exchange 'hierarchical'.*direct"),
    ],
)
def test_an_exchange_that_is_not_there(exchange: str, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        considered(exchange=exchange)
