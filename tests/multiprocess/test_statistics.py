"""What `mkernel.stats` counts, and the names that profilers see, of known calls too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_world import DEADLINE_S
from torch.profiler import ProfilerActivity, profile

import mkernel
from mkernel.backends.contracts.nic import NicSession
from mkernel.errors import ShapeError
from mkernel.world import profiling

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

BACKEND = "starting_backend:Starting"
M, N, K = 64, 40, 72
F32 = 4


def launched(function: Callable[[], Any], accelerator: str, nodes: int = 1, each: int = 2) -> Any:
    return mkernel.launch(
        function, nodes=nodes, ranks_per_node=each, accelerator=accelerator, timeout_s=DEADLINE_S
    )


def operands(rows: int = M) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, K), torch.ones(K, N)


# ---- statistics ----------------------------------------------------------------------------------


def several_ops() -> list[mkernel.Statistics]:
    found = [mkernel.stats()]
    a, b = operands()
    for _ in range(3):
        mkernel.all_gather_gemm(a, b)
    mkernel.gemm_all_reduce(a, b)
    mkernel.gemm_all_reduce(*operands(2 * M))
    with pytest.raises(ShapeError):
        mkernel.all_gather_gemm(a, torch.ones(K + 1, N))
    mkernel.synchronize()
    return [*found, mkernel.stats()]


def test_calls_bytes_shapes_and_waits() -> None:
    for before, after in launched(several_ops, "streams"):
        assert before == mkernel.Statistics(calls={}, sent_bytes={})
        assert after.calls == {"all_gather_gemm": 3, "gemm_all_reduce": 2}
        gathered, reduced = 3 * M * K * F32, 3 * 2 * M * N // 2 * F32
        assert after.sent_bytes == {"process group": gathered + reduced}
        assert after.new_shapes == 3
        assert after.waits == 5
        assert after.waited_s > 0
        assert (after.retries, after.errors) == (0, 0)  # a wrong call is none


def until_carried(nic: NicSession, least: float) -> int:
    """Return the bytes of the NIC's puts once these are at least ``least`` and rest. Collective. The
    proxy counts a put after it has posted it, perhaps later than the peer has its bytes."""
    mkernel.world().barrier()  # all that peers wait for is posted
    latest, before = time.monotonic() + DEADLINE_S, -1
    while (carried := nic.statistics().put_bytes) < least or carried != before:
        assert time.monotonic() < latest, f"{carried} of {least} bytes"
        before = carried
        time.sleep(0.05)
    return carried


def through_the_nic() -> tuple[mkernel.Statistics, int]:
    a, b = operands()
    mkernel.all_gather_gemm(a.half(), b.half())
    session = mkernel.world().nic
    assert session is not None
    until_carried(session, 2 * M * K * 2)  # of two ranks there
    return mkernel.stats(), session.statistics().put_bytes


def test_what_the_nic_carries_it_counts_itself() -> None:
    for found, carried in launched(through_the_nic, "ascend", nodes=2):
        assert found.calls == {"all_gather_gemm": 1}
        assert found.sent_bytes["peer memory"] == M * K * 2
        assert found.sent_bytes["nic"] == carried
        assert carried >= 2 * M * K * 2


def test_calls_that_raise_are_errors() -> None:
    with pytest.raises(mkernel.errors.WorldError):
        launched(raises_and_counts, "streams")


def raises_and_counts() -> None:
    if mkernel.world().rank == 1:
        raise mkernel.errors.Cancelled("enough")
    a, b = operands()
    try:
        mkernel.all_gather_gemm(a, b)
    except mkernel.errors.WorldError:
        assert mkernel.stats().errors == 1
        assert mkernel.stats().calls == {}
        raise


def known_ones() -> tuple[int, mkernel.Statistics]:
    backend: Any = mkernel.world().accelerator
    a, b = operands()
    for _ in range(6):
        mkernel.gemm_all_reduce(a, b)
    mkernel.synchronize()
    return len(backend.started), mkernel.stats()


def test_calls_that_native_code_starts_are_counted_too() -> None:
    for started, found in launched(known_ones, BACKEND):
        assert started == 5
        assert found.calls == {"gemm_all_reduce": 6}
        assert found.new_shapes == 1
        each = 2 * M // 2 * N * F32
        assert sum(found.sent_bytes.values()) == 6 * each


# ---- names ---------------------------------------------------------------------------------------


def names(call: Callable[[], object], times: int = 1) -> list[str]:
    """Of mkernel's ranges in what torch.profiler saw."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(times):
            call()
    return [event.name for event in seen.events() if event.name.startswith("mkernel.")]


def known_profiled() -> tuple[list[str], int]:
    backend: Any = mkernel.world().accelerator
    a, b = operands()
    found = names(lambda: mkernel.gemm_all_reduce(a, b), 4)
    return found, len(backend.started)


def test_known_calls_stay_known_under_a_profiler() -> None:
    for found, started in launched(known_profiled, BACKEND, each=1):
        assert found == ["mkernel.gemm_all_reduce"] * 4
        assert started == 3


class Ranges:
    """What a tool that listens to NVTX hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def rangePushA(self, name: str) -> None:
        self.heard.append(name)

    def rangePop(self) -> None:
        self.heard.append("end")


def heard() -> list[str]:
    a, b = operands()
    mkernel.gemm_all_reduce(a, b)  # nobody listens
    profiling.nvtx = ranges = Ranges()
    try:
        mkernel.gemm_all_reduce(a, b)
        with pytest.raises(ShapeError):
            mkernel.gemm_all_reduce(a, b[1:])
    finally:
        profiling.nvtx = None
    mkernel.gemm_all_reduce(a, b)
    return ranges.heard


def test_nvtx_hears_calls_while_a_tool_listens() -> None:
    for found in launched(heard, "streams"):
        assert found == ["mkernel.gemm_all_reduce", "end"] * 2
