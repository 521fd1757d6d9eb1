"""Worlds whose NIC breaks: every rank raises the same kind of error in time, and the same processes
make a new world that works."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from in_world import gathers, stores

import mkernel
from mkernel.cases.base import TOLERANCE
from mkernel.conformance.ranks import give_up_after
from mkernel.errors import WorldError
from mkernel.launch import host_store

T = TypeVar("T")

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

NODES = 3
TIMEOUT_S = 240.0
STALLED_S = 4.0
"""Deadline where nothing else may tell of a fault."""
FAULTS = "MKERNEL_SOFTVERBS_FAULTS"


def join(port: int, nic: str, fault: str | None) -> None:
    """A world of this process; rank 0's device may have a fault."""
    if fault is not None and os.environ["RANK"] == "0":
        os.environ[FAULTS] = fault
    try:
        mkernel.init(
            nodes=NODES,
            ranks_per_node=1,
            nic=nic,
            timeout_s=TIMEOUT_S,
            stores=stores(port),
            accelerator="ascend",
        )
    finally:
        os.environ.pop(FAULTS, None)


def run(body: Callable[..., T], *arguments: Any) -> list[T]:
    """``body(port, *arguments)`` on every rank; a store for worlds of their own is on that port."""
    store, port = host_store(NODES, 30)
    try:
        return mkernel.launch(
            body, port, *arguments, nodes=NODES, ranks_per_node=1, accelerator="ascend"
        )
    finally:
        del store


def break_and_rebuild(port: int, nic: str, fault: str) -> tuple[str, float, float, str]:
    """(kind of error, seconds until it was raised, error of the new world's call, message)."""
    mkernel.finalize()
    join(port, nic, fault)
    if fault.startswith("stall"):
        give_up_after(STALLED_S)
    start = time.monotonic()
    try:
        for seed in range(10_000):
            gathers(seed)
        raise AssertionError(f"{fault} went unnoticed")
    except WorldError as error:
        kind, message, seconds = type(error).__name__, str(error), time.monotonic() - start
        mkernel.finalize(error)
    join(port, nic, None)
    return kind, seconds, max(gathers(seed) for seed in range(3)), message


@pytest.mark.parametrize(
    "fault", ["drop@20", "cut@20", "cut@300ms", "stall@20", "qp-error@20", "cq-overflow@20"]
)
@pytest.mark.parametrize("nic", ["cx7", "efa"])
def test_every_rank_hears_of_it_and_goes_on(
    nic: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_NIC_SETTINGS__QP_TIMEOUT", "13")  # 0.2 s with all retries
    monkeypatch.setenv("MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS", "200")
    results = run(break_and_rebuild, nic, fault)
    print(fault, [(kind, round(seconds, 1), message) for kind, seconds, _, message in results])
    (kind,) = {kind for kind, *_ in results}
    # A device that is silent is an error of those who have puts to it under way; where nobody has
    # one, the deadline of a wait for its puts is what remains.
    assert kind == "NicError" or (fault.startswith("stall") and kind == "Timeout")
    for _, seconds, error, _ in results:
        assert seconds < TIMEOUT_S / 2  # of what has another deadline, the device must tell
        assert error <= TOLERANCE["float32"]


def heals(port: int, nic: str, fault: str) -> float:
    mkernel.finalize()
    join(port, nic, fault)
    return max(gathers(seed) for seed in range(30))


@pytest.mark.parametrize("fault", ["cut@20+50ms", "stall@20+50ms"])
@pytest.mark.parametrize("nic", ["cx7", "efa"])
def test_a_link_that_comes_back_in_time_costs_time_alone(nic: str, fault: str) -> None:
    for error in run(heals, nic, fault):
        assert error <= TOLERANCE["float32"]
