"""Kernels on threads of the host write to peers until a call ends, and wait for what puts need."""

from __future__ import annotations

import ctypes
import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest

from mkernel.backends.contracts.memory import PeerMemory
from mkernel.backends.runtime.host_kernels import Ended, Kernel
from mkernel.backends.transport import _transport

SIGNALS = 8
TIMEOUT_S = 60.0


class Pad:
    """A signal pad in memory of its own."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_transport.pad_bytes(SIGNALS) + 64)
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64
        _transport.pad_format(self.address, SIGNALS)


@pytest.mark.parametrize(
    ("begun_s", "aborted", "reaches"),
    [(0.0, False, True), (-2 * TIMEOUT_S, False, False), (0.0, True, False)],
    ids=["in time", "late", "aborted"],
)
def test_what_is_late_reaches_no_peer(begun_s: float, aborted: bool, reaches: bool) -> None:
    """As a rank finds it that was stopped, and goes on when the others have given it up."""
    own, theirs = Pad(), Pad()
    rows, there = ctypes.create_string_buffer(b"rows"), ctypes.create_string_buffer(5)
    if aborted:
        _transport.pad_abort(own.address, _transport.AbortCode.timeout)
    call: Any = Mock(
        rank=0,
        pad=own.address,
        workspace=ctypes.addressof(rows),
        peers={1: PeerMemory(theirs.address, ctypes.addressof(there))},
        begun_s=time.monotonic() + begun_s,
        timeout_s=TIMEOUT_S,
    )
    call.plan.world_size = 2
    kernel = Kernel(call, _transport.Waiter.comm_kernel)
    kernel._put(1, 0, 4, 3)
    kernel.tell(1, 3)
    assert there.value == (b"rows" if reaches else b"")
    assert _transport.pad_load(theirs.address, 3) == (2 if reaches else 0)


@pytest.mark.parametrize("read", [False, True])
def test_a_call_that_only_computes_overwrites_nothing_that_a_peer_has_not_read(read: bool) -> None:
    """Its data are used by nobody, but they go where those of the call before the last one lie."""
    own, signal, peer = Pad(), 3, 1
    _transport.pad_move_on(own.address, signal, 2)  # two calls have ended here
    if read:
        _transport.pad_add(own.address, signal, 1)
    call: Any = Mock(rank=0, pad=own.address, view="compute_only", timeout_s=0.05, number=3)
    call.plan.world_size = 2
    Kernel(call, _transport.Waiter.compute_kernel).wait(signal, peer)
    with nullcontext() if read else pytest.raises(Ended):
        Kernel(call, _transport.Waiter.comm_kernel).wait(signal, peer, amount=-1)
