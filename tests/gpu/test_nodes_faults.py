"""Between nodes on GPUs: faults beneath the kernels are seen, and what stops a kernel in its middle
becomes one named error on every rank in time. Each rank is a node of its own."""

from __future__ import annotations

import nodes_faults_ranks
import nodes_ranks
import pytest
from device_buffers import takes_ranks
from hopper_ranks import Shape
from in_world import TOLD_S
from test_hopper_nodes import DIRECT, MIXED, both, direct, launched, nics, take

from mkernel.launch import host_store

pytestmark = [takes_ranks(2), pytest.mark.usefixtures("leaves_nothing")]
planted = pytest.mark.parametrize("fault", [False, True], ids=["honest", "planted"])
EARLY = [
    Shape("all_gather_gemm", 1536, 512, 1024),
    Shape("gemm_reduce_scatter", 2048, 768, 256),
    Shape("gemm_all_reduce", 1024, 1024, 320),
]


def judge_broken(
    kind: str,
    nic: str,
    fault: str | None,
    shape: Shape,
    next_nic: str = "",
    timeout_s: float = TOLD_S,
) -> list[str]:
    """Each rank raises this kind of error in time, and the next world of the processes is right. Return
    the messages."""
    _store, port = host_store(2, TOLD_S)
    outcomes = launched(
        nodes_ranks.break_and_rebuild, port, nic, fault, shape, next_nic, timeout_s,
        nic=next_nic or nic, fresh=True,
    )  # fmt: skip
    for raised, message, seconds, goes_on in outcomes:
        assert raised == kind, message
        assert seconds < TOLD_S / 2
        assert goes_on
    return [message for _, message, _, _ in outcomes]


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
    _store, port = host_store(2, TOLD_S)
    failures = launched(nodes_faults_ranks.told_early, port, shape, 4, fault, graph, nic=nic)
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
    """Rows of the next call lie there before those of a call were read."""
    take(route, monkeypatch)
    _store, port = host_store(2, TOLD_S)
    failures = launched(nodes_faults_ranks.reused_early, port, EARLY[0], fault, nic=nic)
    assert len(failures[0]) == fault, failures


@nics
@both
@planted
def test_a_nic_that_tells_before_the_bytes_are_there(
    fault: bool, route: str, nic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(route, monkeypatch)
    monkeypatch.setenv("MKERNEL_SOFTVERBS_LATE_NS", str(2_000_000_000 * fault))
    for each in launched(nodes_faults_ranks.of_each, EARLY, nic=nic):
        assert [bool(failures) for failures in each] == [fault] * len(EARLY), each


@pytest.mark.alone(keeps_ranks=True)
@direct
@nics
@pytest.mark.parametrize("flush", [True, False], ids=["honest", "left out"])
def test_a_flush_that_is_left_out(flush: bool, nic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take("direct", monkeypatch)
    monkeypatch.setenv("MKERNEL_SOFTVERBS_UNFLUSHED", "1")
    for failures in launched(nodes_faults_ranks.unflushed, EARLY, flush, nic=nic, fresh=True):
        assert bool(failures) != flush


@direct
@nics
def test_a_rank_that_asks_its_driver_in_mid_kernel(
    nic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulated NIC's copies go on meanwhile."""
    take("direct", monkeypatch)
    for failures in launched(nodes_faults_ranks.asking_the_driver, EARLY[0], 4, nic=nic):
        assert not failures


@nics
@both
def test_a_fifo_that_stays_full(nic: str, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's device does nothing more, and no NIC gives up within the deadline: many blocks wait for
    room in a full FIFO, of which one is late first, and every rank hears of it."""
    take(route, monkeypatch)
    monkeypatch.setenv("MKERNEL_NIC_SETTINGS__QP_TIMEOUT", "22")  # minutes
    monkeypatch.setenv("MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS", "60000")
    monkeypatch.setenv("MKERNEL_NIC_SETTINGS__FIFO_SLOTS", "16")
    monkeypatch.setenv("MKERNEL_NIC_SETTINGS__QUEUE_DEPTH", "16")
    shape = Shape("gemm_reduce_scatter", 8192, 4096, 512)  # 512 puts a rank
    judge_broken("Timeout", nic, "stall@40", shape, nic, 4.0)


@pytest.mark.parametrize(
    ("nic", "fault"), [("cx7", "MissingReceiveOnRc"), ("efa", "MissingReceive")]
)
@both
def test_a_peer_without_receives(
    route: str, nic: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credits keep senders from it, so that a library beneath the backend must forget to post receives:
    RNR, and no more of it than was asked for."""
    take(route, monkeypatch)
    library = f"mkernel.conformance.nic_faults:{fault}"
    messages = judge_broken("NicError", library, None, EARLY[1], nic)
    assert any("RNR" in message for message in messages)


@nics
@pytest.mark.parametrize(
    ("fault", "route"),
    [
        *((f"{kind}@20", "staged") for kind in ("drop", "cut", "stall", "qp-error", "cq-overflow")),
        *(pytest.param(fault, "direct", marks=DIRECT) for fault in ("cut@20", "qp-error@20")),
    ],
)
def test_a_nic_error_in_mid_kernel(
    nic: str, fault: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(route, monkeypatch)
    monkeypatch.setenv("MKERNEL_NIC_SETTINGS__QP_TIMEOUT", "13")  # 0.2 s with all retries
    monkeypatch.setenv("MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS", "200")
    shape = Shape("gemm_all_reduce", 2048, 1024, 512)  # more than 20 puts
    judge_broken("NicError", nic, fault, shape)


@pytest.mark.parametrize("fault", [False, True], ids=["honest", "miscounts"])
def test_an_arrival_that_is_counted_too_early_is_seen(
    fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between backend and device a library claims one message fewer of each put than it has."""
    monkeypatch.setenv("MKERNEL_SOFTVERBS_MAX_MESSAGE", "4096")  # every put has several
    monkeypatch.setenv("MKERNEL_SOFTVERBS_HOLD_NS", "400000")
    name = "MiscountedImmediate" if fault else "HonestLibrary"
    found = launched(
        nodes_ranks.noticed,
        6 * MIXED[:2],
        12,
        nic=f"mkernel.conformance.nic_faults:{name}",
        timeout_s=10,
    )
    assert any(found) == fault, found
