"""Calls of products in parts on the host: ranks are threads, and the native module and torch's products
stand-ins (``parts_fabric``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from parts_fabric import (
    BYTES,
    MAIN,
    Order,
    PartsFabric,
    block_mm,
    flat_at,
    mm,
    scale_results,
    scaled_mm,
)

from mkernel.backends.accelerators.cuda import device_world, starters
from mkernel.backends.accelerators.cuda.collectives import landing, norm
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.gemm import (
    gather_parts,
    library,
    parts_exchange,
    parts_program,
    products,
    reduce_parts,
)
from mkernel.backends.accelerators.hopper.dispatch import executor_of
from mkernel.backends.contracts import scaled as contract
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.instrumented import View
from mkernel.backends.contracts.memory import PeerMemory
from mkernel.cases import case_of
from mkernel.plan.model import LaunchPlan

LATE_S = 0.02


def fabrics(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[..., PartsFabric] = PartsFabric
) -> Callable[..., Any]:
    """Makes the fabric of a world, of that kind."""

    def make(*world: Any) -> PartsFabric:
        made = kind(*world)
        for module in (
            library, device_world, landing, parts_exchange, parts_program, gather_parts, reduce_parts,
            norm, starters,
        ):  # fmt: skip
            monkeypatch.setattr(module, "native", lambda: made)
        monkeypatch.setattr(parts_exchange, "bytes_at", flat_at)
        monkeypatch.setattr(products, "mm", mm)
        monkeypatch.setattr(products, "scaled_mm", scaled_mm)
        monkeypatch.setattr(products, "scale_results", scale_results)
        monkeypatch.setattr(contract, "block_mm", block_mm)
        return made

    return make


def case(made: LaunchPlan) -> Any:
    """The case that fills and judges a plan's calls."""
    sizes = made.gemm.model_dump(exclude={"kind"})
    options: dict[str, Any] = {"replicate_b": False, "bias": made.bias is not None}
    if made.scales is not None:
        options["scales"] = made.scales.mode
    return case_of(made.op)(sizes, made.dtype, made.out_dtype, made.b_layout, options=options)


def call_of(
    made: LaunchPlan,
    fabric: PartsFabric,
    rank: int,
    tensors: dict[str, torch.Tensor],
    number: int = 1,
    **more: Any,
) -> Call:
    """A rank's call of a plan."""
    each = made.ranks_per_node
    others = [
        peer for peer in range(rank // each * each, (rank // each + 1) * each) if peer != rank
    ]
    return Call(
        plan=made, rank=rank, tensors=tensors, epoch=number, number=number, pad=0,
        workspace=fabric.workspace(rank), areas=(0,),
        peers={peer: PeerMemory(0, fabric.workspace(peer)) for peer in others},
        region=0, fifo=0, timeout_s=1.0, **more,
    )  # fmt: skip


def run(
    made: LaunchPlan,
    fabric: PartsFabric,
    *,
    view: View = "pipelined",
    gathered: bool = False,
    symmetric: bool = False,
    calls: int = 2,
    late: int | None = None,
    behind: threading.Event | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Every rank's tensors after calls on fresh data, each checked against the oracle. ``late``: a rank
    that begins each call later than the others; ``behind``: a second after that is set."""
    world, shape, of = made.world_size, made.gemm, case(made)
    rows = shape.m // world if made.op == "gemm_reduce_scatter" else shape.m
    dtype = getattr(torch, made.out_dtype)
    outs = [torch.empty(rows, shape.n, dtype=dtype) for _ in range(world)]
    shared = {"out": tuple(each.data_ptr() for each in outs)} if symmetric else {}
    workspace = executor_of(made).workspace(made).areas[0]
    assert workspace <= BYTES + fabric.DATA_OFFSET
    everyone: list[dict[str, torch.Tensor]] = [{} for _ in range(world)]

    def start(rank: int) -> None:
        order: Any = Order(fabric.told[rank])
        executor: Any = None
        for number in range(1, calls + 1):
            given = of.inputs(rank, world, number)
            tensors = {**given, "out": outs[rank].fill_(torch.nan)}
            if gathered:
                tensors["gathered"] = torch.zeros(shape.m, shape.k, dtype=given["a"].dtype)
                scale = given.get("a_scale")
                if scale is not None:
                    places = world * len(scale), scale.shape[1]
                    tensors["gathered_scale"] = torch.full(places, torch.nan)
            call = call_of(made, fabric, rank, tensors, number, view=view, symmetric=shared)
            context = DispatchContext(0, order, 64, one=torch.ones(1, 1))
            executor = executor or executor_of(made)(call, context)
            if late == rank:
                assert behind is None or behind.wait(60)
                time.sleep(LATE_S if behind is None else 1.0)
            executor.start(call, MAIN)
            assert order.open == 0
            everyone[rank] = {name: each.clone() for name, each in tensors.items()}
            if view != "compute_only":
                found = of.compared({"out": tensors["out"]}, rank, world, number)
                assert of.passed(found), f"rank {rank} call {number}: {found}"

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(start, range(world)))
    return everyone
