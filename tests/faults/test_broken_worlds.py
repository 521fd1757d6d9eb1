"""Worlds that break, beside what the kit judges (`killed-rank`, `absent-rank`, `mismatched-call`):
every rank raises the same kind of error within the deadline, and says why."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from in_world import ABSENT_S, DEADLINE_S, TOLD_S, stores, survivors

import mkernel
from mkernel.cases import case_of
from mkernel.conformance.ranks import give_up_after
from mkernel.errors import PeerFailure, PlanMismatch, Timeout, WorldError
from mkernel.launch import host_store, report
from mkernel.world.agreement import Agreement

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

CASE = case_of("all_gather_gemm")({"m": 1024, "n": 512, "k": 512}, "float16", "float32")
launch = partial(mkernel.launch, timeout_s=DEADLINE_S, accelerator="ascend")


def call(rows: int = 256, n: int = 512) -> torch.Tensor:
    return mkernel.all_gather_gemm(
        torch.randn(rows, 512).half(), torch.randn(512, n).half(), out_dtype=torch.float32
    )


def test_a_strict_simulation_adds_who_waits_for_what_where_a_rank_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MKERNEL_ASCEND_STRICT", "1")
    results = survivors(
        CASE, 3, "absent", nodes=2, ranks_per_node=2, timeout_s=DEADLINE_S, accelerator="ascend"
    )
    for kind, seconds, message in results:
        assert kind == "Timeout"
        assert 0.75 * ABSENT_S < seconds < TOLD_S
        told = re.match(
            r"rank (\d) \w+ \(block \d+\) waited for .* of rank 3 on signal (\d+)", message
        )
        assert told, message
        rank, signal_ = told.groups()
        assert f"; all that waited on rank {rank} then: " in message
        each = rf" for signal {signal_} of rank 3 to be \d+, now \d+ \(\w+\.hpp:\d+\)"
        assert re.search(each, message)
    assert len({message for _, _, message in results}) == 1


def first_call_differs(argument: str) -> None:
    rank = mkernel.world().rank
    if argument == "n":
        call(n=512 if rank == 0 else 256)
    elif argument == "m":
        call(rows=256 if rank == 0 else 128)


@pytest.mark.parametrize("argument", ["m", "n"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_call_other_shapes_are_refused(argument: str, nodes: int) -> None:
    with pytest.raises(PlanMismatch) as caught:
        launch(first_call_differs, argument, nodes=nodes, ranks_per_node=2)
    assert caught.value.field == f"shape.{argument}"
    assert caught.value.ranks[0] == 0


def later_call_differs() -> None:
    rank = mkernel.world().rank
    call()
    call(n=512 if rank else 256)  # rank 0's plan is new, the others' is known and starts at once


def test_a_rank_in_another_known_call_is_found() -> None:
    start = time.monotonic()
    with pytest.raises(PlanMismatch) as caught:
        launch(later_call_differs, nodes=2, ranks_per_node=2)
    assert caught.value.field == "shape.n"
    assert time.monotonic() - start < TOLD_S


def differs_then_goes_on() -> float:
    with pytest.raises(PlanMismatch):
        first_call_differs("n")
    return float(call().abs().sum())


def test_a_refused_call_leaves_the_world_usable() -> None:
    assert all(value > 0 for value in launch(differs_then_goes_on, nodes=2))


def differs_and_agrees_late() -> float:
    agree = Agreement._agree

    def late(self: Agreement, *arguments: Any) -> None:
        if mkernel.world().rank == 0:
            time.sleep(1.5)  # others have looked at this rank's heartbeat meanwhile
        agree(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agreement, "_agree", late)
        with pytest.raises(PlanMismatch):
            first_call_differs("n")
    return float(call().abs().sum())


def test_a_rank_that_has_not_agreed_yet_is_waited_for() -> None:
    assert all(value > 0 for value in launch(differs_and_agrees_late, nodes=2))


def leave_early() -> None:
    if mkernel.world().rank == 1:
        return
    give_up_after(ABSENT_S)
    call()


def test_a_rank_that_left_is_named() -> None:
    with pytest.raises((PeerFailure, Timeout), match="rank"):
        launch(leave_early, nodes=1, ranks_per_node=3)


def waits_on_the_host(pause_s: float) -> tuple[str, ...]:
    """What a rank raises, twice, whose peer does not come to a call that is new to it."""
    world = mkernel.world()
    call()
    world.barrier()
    give_up_after(ABSENT_S)
    if world.rank == 1:
        time.sleep(pause_s)  # its own deadline comes later
    if world.rank == 2:
        time.sleep(2 * ABSENT_S + pause_s)
    said = []
    for rows in (384, 640):
        with pytest.raises(WorldError) as caught:
            call(rows=rows)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    mkernel.finalize(caught.value)
    return tuple(said)


@pytest.mark.parametrize("accelerator", ["ascend", "streams"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_wait_on_the_host_breaks_the_world_too(nodes: int, accelerator: str) -> None:
    said = mkernel.launch(
        waits_on_the_host, ABSENT_S / 2, nodes=nodes, ranks_per_node=3 // nodes,
        timeout_s=DEADLINE_S, accelerator=accelerator,
    )  # fmt: skip
    (once,) = {text for each in said for text in each}
    assert re.match(r"Timeout: ranks \[(1, )?2\] did not reach", once)


def report_stays_broken() -> None:
    world = mkernel.world()
    call()
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    report((call_until_it_raises(), call_until_it_raises()))


def call_until_it_raises() -> str:
    try:
        while True:
            call()
    except WorldError as error:
        return type(error).__name__


def test_later_calls_raise_the_same_error() -> None:
    seen: dict[int, tuple[str, str]] = {}
    with pytest.raises(PeerFailure):
        launch(report_stays_broken, ranks_per_node=2, on_report=seen.__setitem__)
    assert seen == {0: ("PeerFailure", "PeerFailure")}


def calls_without_a_store(port: int) -> tuple[str, int]:
    mkernel.finalize()
    mkernel.init(ranks_per_node=2, accelerator="ascend", stores=stores(port))
    call()
    mkernel.world().barrier()
    report("there")
    with pytest.raises(WorldError) as caught:
        new_shapes_for_ever()
    mkernel.finalize(caught.value)
    assert isinstance(caught.value, PeerFailure)
    return type(caught.value).__name__, caught.value.peer


def new_shapes_for_ever() -> None:
    for rows in range(128, 100_000, 128):  # each is agreed on through the store
        call(rows=rows)


def test_a_lost_store_is_a_peer_failure_on_whichever_thread_finds_it() -> None:
    held: dict[str, object] = {}
    held["store"], port = host_store(2, DEADLINE_S)
    there: set[int] = set()

    def lose(rank: int, said: str) -> None:
        there.add(rank)
        if len(there) == 2:
            held.clear()

    told = launch(calls_without_a_store, port, ranks_per_node=2, on_report=lose)
    assert told == [("PeerFailure", 0)] * 2


def kill_while_calling(victim: int) -> None:
    if mkernel.world().rank == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        call(rows=1024)


@pytest.mark.parametrize(("victim", "nic"), [(0, "cx7"), (3, "cx7"), (0, "efa"), (2, "efa")])
def test_rank_killed_in_mid_kernel(victim: int, nic: str) -> None:
    start = time.monotonic()
    with pytest.raises(PeerFailure) as caught:
        launch(kill_while_calling, victim, nodes=2, ranks_per_node=2, nic=nic)
    assert caught.value.peer == victim
    assert time.monotonic() - start < TOLD_S
    for value in launch(differs_then_goes_on, nodes=2, nic=nic):
        assert value > 0  # the next world of this process works
