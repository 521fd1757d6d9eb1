"""What crosses nodes takes the queue pairs that the plan gives it, on both NICs, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from in_world import relative, shards, stores

import mkernel
from mkernel.backends.accelerators.ascend.schedule import GemmSchedule
from mkernel.backends.contracts.nic import LaneStatistics
from mkernel.cases.base import TOLERANCE
from mkernel.errors import ArgumentError, PlanMismatch
from mkernel.launch import host_store
from mkernel.plan.model import LaunchPlan
from mkernel.settings import load
from mkernel.topology.lanes import NicSchedule
from mkernel.topology.placement import WorldPlacement
from mkernel.topology.routes import RouteTable
from mkernel.world import lifecycle

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

ROWS, K, N = 512, 2048, 64
SENT = ROWS * K * 2
"""Bytes that a rank puts to each rank of the other node."""


def with_lanes(**values: int) -> Any:
    """The settings with other lanes."""
    found = load()
    changed = found.nic_settings.model_copy(update=values)
    return found.model_copy(update={"nic_settings": changed})


def carried() -> tuple[LaunchPlan, tuple[LaneStatistics, ...], float]:
    """A call's plan, what each queue pair carried, and the result's relative error."""
    world = mkernel.world()
    assert world.nic is not None
    plan = mkernel.plan("all_gather_gemm", m=ROWS * world.size, n=N, k=K, dtype="float16")
    a, b = shards(1, world.size, ROWS, K, N)
    c = torch.empty(ROWS * world.size, N)
    mkernel.all_gather_gemm(a[world.rank], b, out=c)
    assert world.nic.flush(30)
    error = relative(c, torch.cat(a).double() @ b.double())
    return plan, world.nic.statistics().lanes, error


@pytest.mark.parametrize(
    ("nic", "values", "stripe_bytes", "striped"),
    [
        ("cx7", {}, None, False),
        ("efa", {"qps": 2, "stripe_bytes": 1 << 30}, 1 << 30, False),
        ("cx7", {"qps": 3, "stripe_bytes": 4096}, 4096, True),
        ("efa", {"qps": 3, "stripe_bytes": 4096}, 4096, True),
    ],
    ids=["one lane", "turns", "stripes by cx7", "stripes by efa"],
)
def test_bytes_take_the_queue_pairs_of_the_plan(
    nic: str, values: dict[str, int], stripe_bytes: int | None, striped: bool
) -> None:
    lanes = values.get("qps", 1)
    for rank, (plan, counted, error) in enumerate(
        mkernel.launch(
            carried,
            nodes=2,
            ranks_per_node=2,
            nic=nic,
            accelerator="ascend",
            settings=with_lanes(**values),
        )
    ):
        assert plan.nics == NicSchedule(queue_pairs=lanes, stripe_bytes=stripe_bytes)
        assert error <= TOLERANCE["float32"]
        chunks = plan.part(GemmSchedule).chunking.chunks_per_rank
        assert chunks > 2
        far = [2, 3] if rank < 2 else [0, 1]
        assert [lane.peer for lane in counted] == [peer for peer in far for _ in range(lanes)]
        for peer in far:
            own = [lane.nbytes for lane in counted if lane.peer == peer]
            assert sum(own) == SENT
            if striped:
                assert max(own) - min(own) < 0.01 * SENT, "each put has a piece on every lane"
            else:
                turns = [nbytes * chunks // SENT for nbytes in own]
                assert max(turns) - min(turns) <= 1, "equal chunks, one lane after the other"


REFUSED = {
    "nics.queue_pairs": (2, "plan.nics.queue_pairs = 2 is not legal; expected 1, as in this world"),
    "nics.stripe_bytes": (4096, "plan.nics.stripe_bytes = 4096"),
    "placement.sites.0.seats.0.nics": (["soft7"], "plan.placement.sites[0].seats[0].nics[0]"),
    "routes.classes.1.rails.0.src_nic": ("soft7", "plan.routes.classes[1].rails[0].src_nic"),
    "routes.classes.1.rails.0.dst_nic": ("soft7", "plan.routes.classes[1].rails[0].dst_nic"),
}
"""A field of a plan, another value of it, and what is said of that."""


def changed() -> dict[str, str]:
    """Return what a world says of its own plan with each field changed; then the world still works."""
    found = {field: refused(field, value) for field, (value, _) in REFUSED.items()}
    assert carried()[2] <= TOLERANCE["float32"]
    return found


def refused(field: str, value: Any) -> str:
    """Return what this rank's world says of its own plan with one field changed."""
    world = mkernel.world()
    plan = mkernel.plan("all_gather_gemm", m=ROWS * world.size, n=N, k=K, dtype="float16")
    told = plan.model_dump(mode="json")
    part = told
    *path, last = field.split(".")
    for name in path:
        part = part[int(name)] if name.isdecimal() else part[name]
    part[last] = value
    another = plan.model_copy(
        update={
            "nics": NicSchedule.model_validate(told["nics"]),
            "placement": WorldPlacement.model_validate(told["placement"]),
            "routes": RouteTable.model_validate(told["routes"]),
        }
    )
    a, b = shards(1, world.size, ROWS, K, N)
    out = torch.empty(ROWS * world.size, N)
    with pytest.raises(ArgumentError) as raised:
        world.run(another, {"a": a[world.rank], "b": b, "out": out})
    return str(raised.value)


def test_a_plan_that_the_sessions_were_not_opened_for_is_refused() -> None:
    for found in mkernel.launch(changed, nodes=2, ranks_per_node=2, accelerator="ascend"):
        for field, (_, says) in REFUSED.items():
            assert says in found[field]


def joins_with(port: int, name: str) -> str:
    """What joining another world says where this rank's setting is not the others'."""
    world = mkernel.world()
    settings = with_lanes(**{name: 2 + world.rank})
    with pytest.raises(PlanMismatch) as refused:
        lifecycle.join(world.identity, world.backends, settings, stores(port), "other lanes")
    return refused.value.field


@pytest.mark.parametrize("name", ["rails", "qps", "stripe_bytes"])
def test_ranks_with_other_lanes_do_not_join(name: str) -> None:
    store, port = host_store(2, 30)
    fields = mkernel.launch(joins_with, port, name, nodes=2, accelerator="ascend")
    assert fields == [f"world.nic_settings.{name}"] * 2
    del store
