"""Worlds that have ended go without Python's cyclic collector, whatever was done in them and however
they ended: nothing of a world refers back to it, and what it held is freed even where a program keeps
the world itself."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
from in_world import DEADLINE_S, own_port
from torch.distributed import TCPStore

import mkernel
from mkernel import fork_server
from mkernel.conformance.ranks import meeting_place
from mkernel.errors import CapacityExceeded, MkernelError, PlanMismatch, Timeout, WorldError
from mkernel.nn import ColumnParallelLinear
from mkernel.world.world import World

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

A, B = torch.ones(8, 16), torch.ones(16, 8)
IDS = torch.tensor([[0, 1]] * 4)
_SOON_S, _LATE_S = 0.5, 1.5
_kept: list[World] = []


def known_calls() -> None:
    for _ in range(3):
        mkernel.all_gather_gemm(A, B)


def symmetric_memory() -> None:
    out = mkernel.empty((8, 8), torch.float32)
    mkernel.all_reduce(out.zero_(), out=out)


def gradients() -> None:
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    mkernel.all_gather_gemm(a, b).sum().backward()
    mkernel.gemm_reduce_scatter(a, b).sum().backward()
    ColumnParallelLinear(16, 8)(A).sum().backward()


def compiled() -> None:
    torch.compile(lambda a: mkernel.all_gather_gemm(a, B), backend="aot_eager")(A)
    torch._dynamo.reset()


def experts() -> None:
    sent = mkernel.moe_dispatch_gemm(torch.ones(4, 8), IDS, torch.ones(1, 8, 8))
    mkernel.moe_combine(sent.outputs, sent.handle, torch.ones(4, 2))


def too_many_rows() -> None:
    def call() -> None:
        mkernel.moe_dispatch_gemm(torch.ones(4, 8), IDS, torch.ones(1, 8, 8), capacity=1)
        mkernel.synchronize()

    with pytest.raises(CapacityExceeded):
        call()


def a_wrong_call() -> None:
    with pytest.raises(PlanMismatch):
        mkernel.all_gather_gemm(torch.ones(8 + 8 * mkernel.world().rank, 16), B)


def a_late_rank() -> None:
    world = mkernel.world()
    world.set_timeout(_SOON_S)
    if world.rank:
        time.sleep(_LATE_S)
    with pytest.raises(Timeout):
        mkernel.all_gather_gemm(A, B)


def a_rank_that_fails() -> None:
    if mkernel.world().rank == 0:
        mkernel.finalize(RuntimeError("planned"))
        return

    def calls() -> None:
        for _ in range(100_000):
            mkernel.all_gather_gemm(A, B)

    with pytest.raises(WorldError):
        calls()


def the_world_is_kept() -> None:
    mkernel.all_gather_gemm(A, B)
    _kept.append(mkernel.world())


WAYS: dict[str, tuple[Callable[[], None], ...]] = {
    "streams": (
        known_calls, symmetric_memory, gradients, compiled, experts, too_many_rows, a_wrong_call,
        a_late_rank, a_rank_that_fails, the_world_is_kept,
    ),
    "ascend": (known_calls, experts, a_late_rank, the_world_is_kept),
    "ascend,streams": (symmetric_memory, a_rank_that_fails, the_world_is_kept),
}  # fmt: skip


def held() -> tuple[int, int]:
    """Descriptors, and mappings of memory that ranks share."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum(" rw-s " in line for line in maps)


def next_world(accelerator: str, nodes: int, port: int) -> World:
    timeout = timedelta(seconds=DEADLINE_S)
    one, two = (
        TCPStore("127.0.0.1", port, timeout=timeout, wait_for_workers=False) for _ in range(2)
    )
    return mkernel.init(
        accelerator=accelerator, nodes=nodes, timeout_s=DEADLINE_S, stores=(one, two)
    )


def worlds_that_stay(accelerator: str, nodes: int, port: int) -> list[str]:
    """Return what a rank still has of worlds after they ended, with the collector off."""
    mkernel.finalize()
    found = []
    gc.collect()
    gc.disable()
    for way in WAYS[accelerator]:
        before = (0, 0)
        for turn in range(3):
            world = next_world(accelerator, nodes, port)
            gone, monitor = weakref.ref(world), weakref.ref(world._failure)
            del world
            way()
            with suppress(MkernelError):
                mkernel.finalize()
            if turn == 1:
                before = held()
        stays = gone() is not None or monitor() is not None
        if stays and way is not the_world_is_kept:
            found.append(f"{way.__name__}: the world is still there")
        more = [now - then for now, then in zip(held(), before, strict=True)]
        if any(each > 0 for each in more):
            found.append(f"{way.__name__}: {more} more descriptors and mappings after a world")
    gc.enable()
    return found


@pytest.mark.parametrize(
    ("accelerator", "nodes"),
    [("streams", 1), ("ascend", 1), ("ascend", 2), ("ascend,streams", 1)],
)
def test_an_ended_world_goes_without_the_collector(accelerator: str, nodes: int) -> None:
    with meeting_place() as port:
        found = mkernel.launch(
            worlds_that_stay, accelerator, nodes, port,
            nodes=nodes, ranks_per_node=2 // nodes, accelerator=accelerator, timeout_s=DEADLINE_S,
        )  # fmt: skip
    assert found == [[], []]


def leaves_early(port: int, rank: int, left: Event, ended: Event) -> None:
    """Rank 0, which hosts the store, ends its world while rank 1 still looks for who has come to the
    end: rank 0 has when it is there."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    mkernel.init(accelerator="streams", timeout_s=DEADLINE_S)
    world = mkernel.world()
    mkernel.all_reduce(torch.ones(2, 2))
    if rank:
        bootstrap = world._failure.bootstrap
        peek_all = bootstrap.peek_all

        def late(keys: list[str]) -> dict[str, object]:
            found = peek_all(keys)
            if found:
                assert left.wait(DEADLINE_S)
            peek_all(keys)
            return found

        bootstrap.peek_all = late  # type: ignore[method-assign]
        try:
            mkernel.finalize()
        finally:
            ended.set()
    else:
        mkernel.finalize()
        gc.collect()
        left.set()
        assert ended.wait(DEADLINE_S)


def test_the_store_serves_ranks_that_end_later_than_its_host() -> None:
    context = fork_server.context()
    left, ended = context.Event(), context.Event()
    with own_port() as port:
        ranks = [
            context.Process(target=leaves_early, args=(port, rank, left, ended))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(DEADLINE_S)
    assert [rank.exitcode for rank in ranks] == [0, 0]
