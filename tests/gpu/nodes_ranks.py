"""What rank processes of test_hopper_nodes run: worlds of GPUs on several nodes."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any, get_args
from unittest import mock

import torch
from attention_ranks import Attention
from calls import DEVICE, judged
from hopper_ranks import Shape
from in_world import TOLD_S, arrivals, stores
from moe_ranks import Moe

import mkernel
from mkernel.backends.accelerators.cuda.schedule import KeysSchedule, PartsSchedule, TokenSchedule
from mkernel.backends.accelerators.hopper.schedule import GatherSchedule, ReduceSchedule
from mkernel.cases import poison
from mkernel.errors import WorldError
from mkernel.plan.model import LaunchPlan
from mkernel.plan.pipeline import Exchange
from mkernel.plan.traffic import RoutedTokens, traffic_of

MASK = 0x5A
FAULTS = "MKERNEL_SOFTVERBS_FAULTS"
RANK_0_FIRST_S = 0.5
"""Rank 1 begins so much later, where rank 0's device has a fault: a stalled device tells its own host
nothing, and a peer finds out only by what it sends to it."""


def arrived(rows: int, k: int) -> tuple[list[str], int, int]:
    """How each rank's rows arrived here, with bytes scrambled by the NIC; bytes that it put, and bytes
    that the plan's exchange puts: the own rows, once for each rank of other nodes or for each node."""
    world = mkernel.world()
    shards = [
        torch.randn(rows, k, generator=torch.Generator().manual_seed(rank)).bfloat16().cuda()
        for rank in range(world.size)
    ]
    b = torch.zeros(k, 64, dtype=torch.bfloat16, device="cuda")
    assert world.nic is not None
    before = world.nic.statistics().put_bytes
    _, whole = mkernel.all_gather_gemm(shards[world.rank], b, return_gathered=True)
    mkernel.synchronize()
    found = arrivals(whole, shards, MASK)
    assert world.nic.flush(5)
    ranks = world.identity.ranks_per_node
    exchange = exchange_of(planned(Shape("all_gather_gemm", world.size * rows, 64, k)))
    assert world.settings.exchange in ("auto", exchange)
    far = world.size - ranks if exchange == "direct" else world.identity.nodes - 1
    return found, world.nic.statistics().put_bytes - before, far * rows * k * 2


def summed(op: str, rows: int, n: int) -> tuple[list[str], int, Exchange]:
    """Failures of a reduction of whole tiles of ``rows`` rows an owner, bytes that the NIC put for it
    here, and the plan's exchange."""
    shape = Shape(op, mkernel.world().size * rows, n, 512)
    return *_put(shape.work()), exchange_of(planned(shape))


def planned(shape: Shape, exchange: Exchange | None = None) -> LaunchPlan:
    """Of the calls of a shape."""
    return mkernel.plan(
        shape.op, dtype=shape.dtype, out_dtype=shape.dtype, exchange=exchange,
        m=shape.m, n=shape.n, k=shape.k,
    )  # fmt: skip


def exchange_of(plan: LaunchPlan) -> Exchange:
    """Of a GEMM op."""
    if isinstance(plan.schedule, PartsSchedule):
        return "direct"
    if plan.op == "all_gather_gemm":
        return plan.part(GatherSchedule).exchange
    return plan.part(ReduceSchedule).exchange


def chosen(shape: Shape) -> tuple[list[str], int, Exchange, tuple[float, ...]]:
    """Failures of a call, bytes that the NIC put for it here, the plan's exchange, and the predicted
    times of both, in microseconds."""
    predictions = [planned(shape, exchange).prediction for exchange in get_args(Exchange)]
    times = tuple(each.pipelined_us for each in predictions if each is not None)
    return *_put(shape.work()), exchange_of(planned(shape)), times


def crossed(shape: Attention | Moe) -> tuple[list[str], int, int, int]:
    """Failures of calls; bytes that the NIC put for them here, and :func:`_leaving`; host memory's
    regions in the session."""
    world, work = mkernel.world(), shape.work(5)
    failures, put = _put(work)
    assert world.nic is not None
    return failures, put, _leaving(shape, work), world.nic.statistics().host_regions


def _leaving(shape: Attention | Moe, work: Any) -> int:
    """Bytes of the own keys and values of ring attention that the other rank sees; of the own tokens
    that the other rank wants and all ids, and for a combine and a GEMM+combine of the own weights and
    of sums for the other rank's tokens (those of a combine alone in float32)."""
    if isinstance(shape, Attention):
        rows = shape.rows // 2 if shape.causal and work.rank == 0 else shape.rows
        return 2 * 2 * shape.batch * shape.kv_heads * rows * shape.width
    places, row = 4 * shape.tokens * work.top_k, 2 * shape.tokens * shape.hidden
    alone, sums = 4 * shape.tokens * shape.features, row if shape.narrow else 2 * row
    owners = work.moe._ids(work.rank, 0) // shape.experts
    wanted = int((owners == 1 - work.rank).any(1).sum())
    return 2 * wanted * shape.hidden + alone + sums + 3 * places


def _carried() -> Counter[int]:
    """Bytes that the NIC has put to each rank."""
    nic = mkernel.world().nic
    assert nic is not None
    assert nic.flush(5)
    return sum((Counter({one.peer: one.nbytes}) for one in nic.statistics().lanes), Counter())


def _far(plan: LaunchPlan, routed: RoutedTokens | None = None) -> dict[int, float]:
    """Bytes that a plan says go to each rank of another node."""
    rank, each = mkernel.world().rank, plan.ranks_per_node
    planned = traffic_of(plan, routed).from_rank(rank)
    return {peer: nbytes for peer, nbytes in planned.items() if peer // each != rank // each}


def attended(
    shapes: list[Attention],
) -> list[tuple[list[str], dict[int, float], dict[int, float], Exchange]]:
    """Failures of a call of each shape, bytes that the NIC put to each rank for it, those that its plan
    says, and its exchange."""
    found = []
    for shape in shapes:
        work = shape.work(3)
        work.fill(0)
        before = _carried()
        work.call()
        mkernel.synchronize()
        plan = shape.planned()
        put: dict[int, float] = dict(_carried() - before)
        found.append((work.failure(0), put, _far(plan), plan.part(KeysSchedule).exchange))
    return found


def travelled(
    shapes: list[Moe],
) -> list[tuple[str, dict[int, float], dict[int, float], Exchange]]:
    """Return of each call of the three MoE ops which it was, bytes that the NIC put to each rank, those
    that its plan says, and its exchange."""
    world, found = mkernel.world(), []
    launch, calls = world.accelerator.launch, list[tuple[LaunchPlan, dict[int, float]]]()

    def launched(call: Any) -> Any:
        before, result = _carried(), launch(call)
        torch.cuda.synchronize()
        calls.append((call.plan, dict(_carried() - before)))
        return result

    for shape in shapes:
        work = shape.work(3)
        work.fill(0)
        calls.clear()
        with mock.patch.object(world.accelerator, "launch", launched):
            work.call()
        mkernel.synchronize()
        ids = [work.moe._ids(rank, 0).tolist() for rank in range(world.size)]
        routed = RoutedTokens(ids, shape.experts * world.size, world.identity.nodes)
        for plan, put in calls:
            how: Any = plan.schedule
            found.append((plan.op, put, _far(plan, routed), how.exchange))
    return found


def overlapped(shape: Moe) -> tuple[int, int]:
    """Return how many pieces of other ranks' tokens had come here in a dispatch+GEMM when the first row
    of its outputs was there, and how many come in all. The NIC raises a signal for each, and one before
    for each rank's ids."""
    world, work = mkernel.world(), shape.work(4)
    nic, plans = world.nic, list[LaunchPlan]()
    assert nic is not None
    launch, beside = world.accelerator.launch, torch.cuda.Stream()

    def launched(call: Any) -> Any:
        plans.append(call.plan)
        return launch(call)

    work.fill(0)
    with mock.patch.object(world.accelerator, "launch", launched):
        outputs = work.dispatched().outputs  # plans, and loads what a call needs
    mkernel.synchronize()
    each, how = world.identity.ranks_per_node, plans[-1].part(TokenSchedule)
    peers = (world.size - each) // (each if how.exchange == "hierarchical" else 1)
    assert nic.flush(TOLD_S)
    work.fill(1)
    work.sent, size = None, (outputs.shape, outputs.dtype)
    del outputs
    poison.freed([size], DEVICE)  # the capacity is the call's, not the case's
    torch.cuda.synchronize()
    before = nic.statistics().signals_raised
    sent = work.dispatched()
    seen, waited = torch.empty(1, dtype=sent.outputs.dtype, pin_memory=True), False
    end = time.monotonic() + TOLD_S
    with torch.cuda.stream(beside):
        while True:
            seen.copy_(sent.outputs[0, :1], non_blocking=True)
            beside.synchronize()
            if poison.count(seen) == 0:
                break
            waited = True
            assert time.monotonic() < end, "no first tile"
    assert waited, "the outputs held no poison"
    came = nic.statistics().signals_raised - before - peers
    mkernel.synchronize()
    assert not work.failure(1, {"outputs": sent.outputs, "counts": sent.counts})
    return came, peers * how.pieces


def _put(work: Any) -> tuple[list[str], int]:
    """Failures of one call, and bytes that the NIC put for it here."""
    nic = mkernel.world().nic
    work.fill(0)
    assert nic is not None
    before = nic.statistics().put_bytes
    work.call()
    mkernel.synchronize()
    failures = work.failure(0)
    assert nic.flush(5)
    return failures, nic.statistics().put_bytes - before


def staged(shape: Shape) -> tuple[bool, int, int]:
    """Whether the world's routes are staged, and how many regions of host and of device memory the
    session has registered behind a call."""
    work = shape.work()
    work.fill(0)
    work.call()
    mkernel.synchronize()
    assert not work.failure(0)
    world = mkernel.world()
    assert world.nic is not None
    counts = world.nic.statistics()
    device_regions = counts.dmabuf_regions + counts.peermem_regions
    return planned(shape).routes.staged, counts.host_regions, device_regions


def noticed(shapes: list[Shape], seed: int) -> str:
    """What shows that something is wrong: results, or the world's error; empty: nothing."""
    try:
        return "; ".join(judged(shapes, seed))
    except WorldError as error:
        mkernel.finalize(error)
        return type(error).__name__


def break_and_rebuild(
    port: int,
    nic: str,
    fault: str | None,
    shape: Shape,
    next_nic: str = "",
    timeout_s: float = TOLD_S,
) -> tuple[str, str, float, bool]:
    """(kind of error, its message, seconds until it was raised, whether the next world of these
    processes is right). Rank 0's device has the fault, in the first of the two worlds. ``next_nic``: of
    the second one, where it is another."""
    mkernel.finalize()
    _join(port, nic, fault, timeout_s)
    start = time.monotonic()
    try:
        work = shape.work()
        for turn in range(2_000):
            work.fill(turn)
            if turn == 0 and os.environ["RANK"] == "1":
                time.sleep(RANK_0_FIRST_S)
            work.call()
            mkernel.synchronize()
        raise AssertionError(f"{fault or nic} went unnoticed")
    except WorldError as error:
        kind, message, seconds = type(error).__name__, str(error), time.monotonic() - start
        mkernel.finalize(error)
    assert float(torch.ones(8, device="cuda").sum()) == 8
    _join(port, next_nic or nic, None)
    return kind, message, seconds, not judged([shape], 3)


def _join(port: int, nic: str, fault: str | None, timeout_s: float = TOLD_S) -> None:
    if fault is not None and os.environ["RANK"] == "0":
        os.environ[FAULTS] = fault
    try:
        mkernel.init(
            nodes=2,
            ranks_per_node=1,
            accelerator="hopper",
            nic=nic,
            verbs="soft",
            timeout_s=timeout_s,
            stores=stores(port),
        )
    finally:
        os.environ.pop(FAULTS, None)
