"""Worlds on stream-ordered backends: calls return early, and what breaks them is not lost."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from in_world import ABSENT_S, DEADLINE_S, TOLD_S

import mkernel
from mkernel.backends.transport import _transport
from mkernel.conformance.ranks import give_up_after
from mkernel.errors import MkernelError, PeerFailure, Timeout, WorldError
from mkernel.launch import report

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

BACKEND = "queueing_backend:Queueing"
M, N, K = 64, 40, 72
LATE_S = 0.5


def backend() -> Any:
    return mkernel.world().accelerator


def inputs(rank: int, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1000 * iteration + rank)
    return torch.randn(M, K, generator=made), torch.randn(K, N, generator=made)


def truth(size: int, iteration: int) -> torch.Tensor:
    """The sum over ranks."""
    parts = [inputs(rank, iteration) for rank in range(size)]
    return sum((a.double() @ b.double() for a, b in parts), torch.zeros(M, N).double())


def right(out: torch.Tensor, size: int, iteration: int) -> bool:
    return bool(torch.allclose(out.double(), truth(size, iteration), rtol=1e-5, atol=1e-4))


def queued(calls: int, out: torch.Tensor) -> list[torch.Tensor]:
    world = mkernel.world()
    outs = [out.clone() for _ in range(calls)]
    for iteration, each in enumerate(outs):
        mkernel.gemm_all_reduce(*inputs(world.rank, iteration), out=each)
    return outs


def early() -> tuple[bool, list[bool]]:
    """Rank 1 calls once rank 0 is back from its calls, and a little later: (was rank 0's output still
    empty then, right)."""
    world = mkernel.world()
    mkernel.gemm_all_reduce(*inputs(world.rank, 0))
    world.barrier()
    if world.rank == 1:
        world.barrier()
        time.sleep(LATE_S)
    outs = queued(3, torch.full((M, N), float("nan")))
    empty = bool(outs[-1].isnan().all())
    if world.rank == 0:
        world.barrier()
    mkernel.synchronize()
    return empty, [right(out, world.size, iteration) for iteration, out in enumerate(outs)]


def test_calls_return_before_they_have_ended_and_synchronize_waits() -> None:
    (empty, good), (_, others) = mkernel.launch(
        early, ranks_per_node=2, accelerator=BACKEND, timeout_s=DEADLINE_S
    )
    assert empty, "rank 0's output was there before rank 1 had called"
    assert all(good)
    assert all(others)


def asked_to_wait() -> tuple[bool, bool, bool]:
    """(right at once when waiting, times given, none given when not)."""
    from mkernel.ops.gemm import GemmCall
    from mkernel.ops.gemm_all_reduce import OP

    world = mkernel.world()
    done = OP.call(GemmCall(*inputs(world.rank, 0)), wait=True)
    other = OP.call(GemmCall(*inputs(world.rank, 1)))
    mkernel.synchronize()
    times = done.record.times.seconds
    return right(done.outputs["out"], world.size, 0), bool(times), not other.record.times.seconds


def test_a_call_that_is_waited_for_has_ended_and_has_times() -> None:
    for found in mkernel.launch(
        asked_to_wait, ranks_per_node=2, accelerator=BACKEND, timeout_s=DEADLINE_S
    ):
        assert found == (True, True, True)


def finalized() -> list[torch.Tensor]:
    return queued(5, torch.zeros(M, N))  # and leaves them to the end of the world


def test_the_end_of_a_world_waits_for_its_calls() -> None:
    for outs in mkernel.launch(
        finalized, ranks_per_node=3, accelerator=BACKEND, timeout_s=DEADLINE_S
    ):
        assert all(right(out, 3, iteration) for iteration, out in enumerate(outs))


# ---- failures --------------------------------------------------------------------------------------


def raised_by(where: str) -> tuple[str, float, str]:
    """(kind, seconds, text) of what ``where`` raises on rank 0 after a call that rank 1 never joins."""
    world = mkernel.world()
    mkernel.gemm_all_reduce(*inputs(world.rank, 0))
    mkernel.synchronize()
    world.barrier()
    if world.rank == 1:
        world.barrier()  # nobody else comes to it: it ends when the world breaks
    give_up_after(ABSENT_S)
    mkernel.gemm_all_reduce(*inputs(0, 1))
    start = time.monotonic()
    try:
        if where == "synchronize":
            mkernel.synchronize()
        elif where == "finalize":
            mkernel.finalize()
        else:
            while True:
                time.sleep(0.05)
                mkernel.gemm_all_reduce(*inputs(0, 1))
    except WorldError as error:
        seconds = time.monotonic() - start
        if where != "finalize":
            mkernel.finalize()  # what broke it has been raised: not again
        report((type(error).__name__, seconds, str(error)))
        raise
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("where", ["synchronize", "finalize", "next call"])
def test_a_time_out_surfaces(where: str) -> None:
    seen: dict[int, tuple[str, float, str]] = {}
    with pytest.raises(MkernelError):
        mkernel.launch(
            raised_by, where, ranks_per_node=2, accelerator=BACKEND, timeout_s=DEADLINE_S,
            on_report=seen.__setitem__,
        )  # fmt: skip
    kind, seconds, text = seen[0]
    assert kind == "Timeout"
    assert seconds < TOLD_S
    assert "rank 0" in text


def dies() -> None:
    world = mkernel.world()
    mkernel.gemm_all_reduce(*inputs(world.rank, 0))
    mkernel.synchronize()
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        while True:
            mkernel.gemm_all_reduce(*inputs(world.rank, 1))
            time.sleep(0.01)
    except WorldError as error:
        codes = backend().aborted
        report((type(error).__name__, time.monotonic() - start, [code.name for code in codes]))
        raise


def test_a_dead_rank_surfaces_at_the_next_call_and_aborts_the_kernels() -> None:
    seen: dict[int, tuple[str, float, list[str]]] = {}
    with pytest.raises(PeerFailure):
        mkernel.launch(
            dies, ranks_per_node=3, accelerator=BACKEND, timeout_s=DEADLINE_S,
            on_report=seen.__setitem__,
        )  # fmt: skip
    assert sorted(seen) == [0, 2]
    for kind, seconds, codes in seen.values():
        assert kind == "PeerFailure"
        assert seconds < TOLD_S
        assert codes
        assert set(codes) == {"peer_failure"}


def recorded() -> None:
    """Rank 1's kernels say, not in the pad, what they waited for; nobody calls anything."""
    world = mkernel.world()
    mkernel.gemm_all_reduce(*inputs(world.rank, 0))
    mkernel.synchronize()
    if world.rank == 1:
        who = _transport.Diagnosis()
        who.waiter, who.peer, who.signal = _transport.Waiter.compute_kernel, 0, 77
        who.seen, who.wanted, who.op, who.chunk, who.core = 3, 4, 1, 5, 9
        _transport.record_failure(backend().record(), _transport.AbortCode.timeout, who)
    deadline = time.monotonic() + TOLD_S
    while not backend().aborted and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        mkernel.synchronize()
    except Timeout as error:
        report(error.diagnosis and vars(error.diagnosis))
        raise


def test_what_a_kernel_recorded_reaches_every_rank_by_the_heartbeat() -> None:
    seen: dict[int, dict[str, Any]] = {}
    with pytest.raises(Timeout):
        mkernel.launch(
            recorded, ranks_per_node=3, accelerator=BACKEND, timeout_s=DEADLINE_S,
            on_report=seen.__setitem__,
        )  # fmt: skip
    assert sorted(seen) == [0, 1, 2]
    for diagnosis in seen.values():
        assert diagnosis == {
            "rank": 1, "waiter": "compute_kernel", "core": 9, "signal": 77, "seen": 3, "wanted": 4,
            "op": 1, "chunk": 5, "peer": 0,
        }  # fmt: skip


def falls_over() -> None:
    world = mkernel.world()
    for iteration in range(2):
        mkernel.gemm_all_reduce(*inputs(world.rank, iteration))
    mkernel.synchronize()


def test_an_error_of_the_device_surfaces() -> None:
    with pytest.raises((RuntimeError, PeerFailure), match="the device fell over"):
        mkernel.launch(
            falls_over,
            ranks_per_node=2,
            accelerator="queueing_backend:Broken",
            timeout_s=DEADLINE_S,
        )
