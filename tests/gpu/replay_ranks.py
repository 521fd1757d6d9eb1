"""Defines what ranks of ``test_replays_on_gpus`` do: unheard replays, and a rank that is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from in_world import stores
from torch.autograd import forward_ad

import mkernel
from mkernel.errors import ArgumentError, WorldError

ALONE_S = 3.0
"""The deadline of waits in worlds that break."""
OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.ones(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))  # type: ignore[return-value]


def graph_of(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of one call, which has run before."""
    call()
    mkernel.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def replays_once_more(op: str, how: str, port: int) -> str:
    """Rank 0 replays a graph that rank 1 does not: what is wrong with how rank 0 hears of it by ``how``
    and rank 1 at its next call, or with the world that both make then."""
    world = mkernel.world()
    rank = world.rank
    a, b = operands()
    call = (
        (lambda: mkernel.all_reduce(a))
        if op == "all_reduce"
        else (lambda: getattr(mkernel, op)(a, b))
    )
    graph, _ = graph_of(call)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    world.barrier()
    world.set_timeout(ALONE_S)
    graph, _ = graph_of(call)  # whose waits have that deadline
    graph.replay()
    mkernel.synchronize()
    world.barrier()
    began = time.monotonic()
    wrong = heard(how, graph, call) if rank == 0 else stays_away(call)
    took = time.monotonic() - began
    if rank == 0 and took > 2 * ALONE_S:
        wrong = wrong or f"it took {took:.1f} s"
    with contextlib.suppress(WorldError):
        mkernel.finalize()
    torch.cuda.synchronize()
    if (torch.ones(4, device="cuda") + 1).sum().item() != 8:
        wrong = wrong or "the device computes no more"
    mkernel.init(accelerator="hopper", timeout_s=60.0, stores=stores(port))
    if not (mkernel.all_reduce(torch.ones_like(a)) == mkernel.world().size).all():
        wrong = wrong or "wrong in the next world"
    mkernel.finalize()
    return wrong


def heard(how: str, graph: torch.cuda.CUDAGraph, call: Callable[[], Any]) -> str:
    graph.replay()
    try:
        if how == "synchronize":
            mkernel.synchronize()
        elif how == "finalize":
            mkernel.finalize()
        else:
            torch.cuda.synchronize()
            call()
    except WorldError:
        return ""
    return f"{how} raised nothing"


def stays_away(call: Callable[[], Any]) -> str:
    time.sleep(2 * ALONE_S)
    try:
        call()
        mkernel.synchronize()
    except WorldError:
        return ""
    return "the rank that stayed away heard nothing of it"


def replays_at_once(beside: str, tries: int) -> list[str]:
    """Two graphs of one world, or a graph and eager calls, on streams that nothing orders: each try is
    right or an error. What is wrong."""
    a, b = operands()
    first, sums = graph_of(lambda: mkernel.all_reduce(a))
    second, products = graph_of(lambda: mkernel.gemm_all_reduce(a, b))
    streams = [torch.cuda.Stream() for _ in range(2)]
    ranks, found = mkernel.world().size, []
    for number in range(tries):
        a.fill_(number % 5 + 1)
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(streams[0]):
                first.replay()
            with torch.cuda.stream(streams[1]):
                if beside == "graph":
                    second.replay()
                else:
                    products = mkernel.gemm_all_reduce(a, b)
            mkernel.synchronize()
        except WorldError as error:
            return [*found, f"error: {type(error).__name__}"]
        torch.cuda.synchronize()
        value = number % 5 + 1
        if not (sums == ranks * value).all() or not (products == ranks * value * 256).all():
            found.append(f"try {number} is wrong without an error")
    return found


def tangents() -> list[str]:
    """Return the calls that took a tangent, of operands that native code has seen before."""
    a, b = operands()
    found = []
    for op in OPS:
        call = getattr(mkernel, op)
        for _ in range(3):
            call(a, b)
        for wanting in (False, True):
            weights = b.clone().requires_grad_(wanting)
            with forward_ad.dual_level():
                try:
                    call(forward_ad.make_dual(a, torch.ones_like(a)), weights)
                    found.append(f"{op}, grad {wanting}: taken")
                except ArgumentError:
                    pass
        if not (mkernel.gemm_all_reduce(a, b) == 256 * mkernel.world().size).all():
            found.append(f"{op}: the world goes on, but wrong")
    return found


def starts_late(folder: Path) -> str:
    """Rank 1 is stopped before a call that native code has started before, until rank 0 has given the
    world up; its watchdog says nothing."""
    world = mkernel.world()
    a, b = operands()
    for _ in range(4):
        mkernel.gemm_all_reduce(a, b)
    mkernel.synchronize()
    world.barrier()
    world.set_timeout(ALONE_S)
    if world.rank == 0:
        mkernel.gemm_all_reduce(a, b)
        try:
            mkernel.synchronize()
            wrong = "no error"
        except WorldError:
            wrong = ""
        os.kill(int((folder / "stopped").read_text()), signal.SIGCONT)
        return wrong
    world._failure._watchdog._on_notice = lambda notice: None
    (folder / "pid").write_text(str(os.getpid()))
    (folder / "pid").rename(folder / "stopped")
    os.kill(os.getpid(), signal.SIGSTOP)
    before = world.statistics().calls.get("gemm_all_reduce", 0)
    try:
        mkernel.gemm_all_reduce(a, b)
    except WorldError:
        begun = world.statistics().calls.get("gemm_all_reduce", 0) - before
        return f"{begun} calls were started" if begun else ""
    return "a call of a world that was given up was started"
