"""What nobody executes is a what-if: no plan holds it, no op takes it, and it says what is missing."""

from __future__ import annotations

from typing import Any

import pytest
from devices import gpu, nic, node, world
from plan_worlds import CAPABILITIES, explained, make
from pydantic import ValidationError
from shipped import constants_of

from mkernel.errors import Unsupported
from mkernel.plan.missing import WhatIf
from mkernel.plan.model import LaunchPlan
from mkernel.plan.planner import plan
from mkernel.topology.model import Node, Topology

SIZES = {"m": 2048, "n": 1024, "k": 2048}
CHIPS = CAPABILITIES.model_copy(update={"simulated": False})
"""Of a backend that runs on real devices, by own puts in a node and NICs between nodes."""
FAR = node((gpu(0), gpu(1)), (nic(0, gpudirect=False), nic(1, gpudirect=False)))
REFUSED = node((gpu(0), gpu(1)), (nic(0), nic(1)), no_p2p=(("cuda0", "cuda1"),))
RAILS = node((gpu(0), gpu(1)), (nic(0), nic(1)))
CONSTANTS = constants_of("ascend")
NOT_JOINED = CONSTANTS.model_copy(update={"cross_rail_share": 0.0})


def twice(one: Node) -> Topology:
    return world(one, one)


CASES: dict[str, tuple[Topology, dict[str, Any], str]] = {
    "host": (
        world(REFUSED),
        {"capabilities": CHIPS},
        "cuda0 of node 0 does not reach the memory of cuda1 of node 0, and no accelerator backend",
    ),
    "staged": (
        twice(FAR),
        {"capabilities": CHIPS},
        r"cuda0 of node 0 reaches cuda0 of node 1 through host memory, because NICs \(mlx5_0\) do not",
    ),
    "relay": (
        twice(RAILS),
        {"capabilities": CHIPS, "constants": NOT_JOINED},
        "cuda0 of node 0 reaches cuda1 of node 1 by a neighbour's NICs, and no accelerator backend",
    ),
    "exchange": (
        twice(RAILS),
        {"capabilities": CHIPS, "exchange": "hierarchical"},
        "accelerator 'ascend' does not run the exchange 'hierarchical' of 'all_gather_gemm'",
    ),
    "no path": (
        twice(RAILS),
        {"capabilities": CHIPS.model_copy(update={"transfer_paths": ("p2p",)})},
        "accelerator 'ascend' has no path between nodes",
    ),
    "chip": (
        twice(RAILS),
        {"capabilities": CHIPS.model_copy(update={"architectures": ("sm_90",)})},
        r"accelerator 'ascend' has kernels for sm_90 only, not for gpu \(architecture unknown\)",
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_what_nobody_executes_is_no_plan(what: str) -> None:
    topology, options, sentence = CASES[what]
    nodes = len(topology.nodes)
    options = {"topology": topology, "constants": CONSTANTS, **options}
    made = explained("all_gather_gemm", SIZES, nodes, 2, **options).plan
    assert isinstance(made, WhatIf)
    assert WhatIf.model_validate_json(made.model_dump_json()) == made
    assert made.prediction is not None
    with pytest.raises(Unsupported, match=sentence) as caught:
        explained("all_gather_gemm", SIZES, nodes, 2, how=plan, **options)
    assert str(caught.value) == "; ".join(made.missing)


@pytest.mark.parametrize("what", ["host", "relay"])
def test_no_plan_holds_such_ways(what: str) -> None:
    topology, options, _ = CASES[what]
    nodes = len(topology.nodes)
    made = explained("all_gather_gemm", SIZES, nodes, 2, topology=topology, **options).plan
    fields = made.model_dump(exclude={"missing", "exchange"})
    with pytest.raises(ValidationError, match=f"a route of kind '{what}'.*no backend takes it"):
        LaunchPlan.model_validate(fields)


def test_who_claims_to_stage_gets_a_plan_of_staged_routes() -> None:
    topology, _, _ = CASES["staged"]
    claims = CHIPS.model_copy(update={"transfer_paths": ("p2p", "nic", "staged")})
    made = make(2, 2, topology=topology, constants=CONSTANTS, capabilities=claims)
    assert made.route(0, 2).staged == ("source", "destination")
    assert made.routes.staged
    assert not make(2, 2, topology=twice(RAILS), constants=CONSTANTS).routes.staged


def test_a_world_may_have_too_many_ranks() -> None:
    claims = CHIPS.model_copy(update={"most_ranks": 3})
    with pytest.raises(Unsupported, match="'ascend' runs worlds of at most 3 ranks, not of 4"):
        explained(
            "all_gather_gemm", SIZES, 2, 2, how=plan, topology=twice(RAILS),
            constants=CONSTANTS, capabilities=claims,
        )  # fmt: skip


def test_a_what_if_says_what_is_missing() -> None:
    topology, options, _ = CASES["host"]
    made = explained("all_gather_gemm", SIZES, 1, 2, topology=topology, **options).plan
    with pytest.raises(ValidationError, match="missing"):
        WhatIf.model_validate({**made.model_dump(), "missing": ()})


def test_plans_do_without_detours_that_would_be_faster() -> None:
    """A neighbour on the wanted rail would be faster where crossing rails is slow, but none relays."""
    slow = CONSTANTS.model_copy(update={"cross_rail_share": 0.5, "p2p_gbs": 100.0})
    topology = twice(RAILS)
    options = {"topology": topology, "constants": slow}
    made = make(2, 2, capabilities=CHIPS, **options)
    assert made.route(0, 3).kind == "nic"
    lacks = CHIPS.model_copy(update={"transfer_paths": ("p2p",)})
    found = explained("all_gather_gemm", SIZES, 2, 2, capabilities=lacks, **options).plan
    assert found.route(0, 3).kind == "relay"
