"""Between nodes on GPUs: faults beneath the kernels are seen, and what stops a kernel in its middle
becomes one named error on every rank in time. Each rank is a node of its own."""

from __future__ import annotations

from typing import Any

import nodes_faults_ranks
import nodes_ranks
import pytest
from device_buffers import takes_ranks
from hopper_ranks import Shape
from test_hopper_nodes import both, direct, nics, take

import mkernel
from mkernel.launch import host_store

pytestmark = [takes_ranks(2), pytest.mark.usefixtures("leaves_nothing")]
planted = pytest.mark.parametrize("fault", [False, True], ids=["honest", "planted"])
EARLY = [
    Shape("all_gather_gemm", 1536, 512, 1024),
    Shape("gemm_reduce_scatter", 2048, 768, 256),
    Shape("gemm_all_reduce", 1024, 1024, 320),
]


def found(fn: Any, *arguments: Any, nic: str) -> list[list[str]]:
    """The failures of each rank."""
    return mkernel.launch(
        fn, *arguments, nodes=2, ranks_per_node=1, accelerator="hopper", nic=nic, verbs="soft",
        timeout_s=30,
    )  # fmt: skip


@nics
@both
@planted
@pytest.mark.parametrize("graph", [False, True], ids=["calls", "replays"])
@pytest.mark.parametrize("shape", EARLY, ids=lambda shape: shape.op)
def test_an_arrival_that_is_counted_once_too_often(
    shape: Shape, graph: bool, fault: bool, route: str, nic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its flag comes before the data, in every later call or replay, where the sender is late."""
    take(route, monkeypatch)
    failures = found(nodes_faults_ranks.told_early, shape, 4, fault, graph, nic=nic)
    assert bool(failures[0]) == fault, failures
    if fault:
        assert len(failures[0]) == 3, "a call that was told early was right all the same"
    else:
        assert not failures[1]


@nics
@both
@planted
def test_memory_that_is_used_again_too_early(
    fault: bool, route: str, nic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(route, monkeypatch)
    first = Shape("all_gather_gemm", 8192, 8192, 4096)
    second = Shape("all_gather_gemm", 2 * 7936, 512, 4096)  # rank 1's rows: from 62 MiB of 64 on
    failures = found(nodes_faults_ranks.reused_early, first, second, 6, fault, nic=nic)
    assert bool(failures[0]) == fault, failures


@direct
@nics
@pytest.mark.parametrize("flush", [True, False], ids=["honest", "left out"])
def test_a_flush_that_is_left_out(flush: bool, nic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take("direct", monkeypatch)
    monkeypatch.setenv("MKERNEL_SOFTVERBS_UNFLUSHED", "1")
    for failures in found(nodes_faults_ranks.unflushed, EARLY, flush, nic=nic):
        assert bool(failures) != flush


@nics
@both
def test_a_fifo_that_stays_full(nic: str, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's device does nothing more, and no NIC gives up within the deadline: kernels fill the
    FIFO, and wait for room in it longer than any other thread for anything else."""
    take(route, monkeypatch)
    monkeypatch.setenv("MKERNEL_NIC_SETTINGS__QP_TIMEOUT", "22")  # minutes
    monkeypatch.setenv("MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS", "60000")
    monkeypatch.setenv("MKERNEL_NIC_SETTINGS__FIFO_SLOTS", "16")
    monkeypatch.setenv("MKERNEL_NIC_SETTINGS__QUEUE_DEPTH", "16")
    shape = Shape("gemm_reduce_scatter", 8192, 4096, 512)  # 512 puts a rank
    outcomes = broken(nic, "stall@40", shape, timeout_s=4)
    for kind, _, seconds, _ in outcomes:
        assert kind == "Timeout"
        assert 3 < seconds < 12
    assert any("the command FIFO has room" in message for _, message, _, _ in outcomes)


@both
def test_a_peer_without_receives(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credits keep senders from it, so that a library beneath the backend must forget to post receives:
    RNR, and no more of it than was asked for."""
    take(route, monkeypatch)
    fault = "mkernel.conformance.nic_faults:MissingReceive"
    outcomes = broken(fault, None, EARLY[1], next_nic="efa")
    for kind, _, seconds, _ in outcomes:
        assert kind == "NicError"
        assert seconds < 15
    assert any("RNR" in message for _, message, _, _ in outcomes)


def broken(
    nic: str, fault: str | None, shape: Shape, timeout_s: float = 20, next_nic: str = ""
) -> list[tuple[str, str, float, bool]]:
    """What each rank found, of which the next world is right."""
    _store, port = host_store(2, 30)
    outcomes = mkernel.launch(
        nodes_ranks.break_and_rebuild, port, nic, fault, shape, timeout_s, next_nic, nodes=2,
        ranks_per_node=1, accelerator="hopper", nic=next_nic or nic, verbs="soft", timeout_s=30,
    )  # fmt: skip
    assert all(goes_on for *_, goes_on in outcomes)
    return outcomes
