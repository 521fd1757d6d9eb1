"""Measurement of this machine's constants for the cost model: CPU, shared memory, a NIC.

The constants are those of a rank on the CPU: its share of the cores, while ``ranks`` of them
compute at once; copies and signals between two processes through shared memory; puts between two
processes through the NIC backend. They are medians, and take a few seconds in all. A busy machine
gives the figures of a busy machine.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mkernel.backends.runtime.host_memory import HostMemory
from mkernel.backends.transport import _transport
from mkernel.errors import BackendUnavailable
from mkernel.harness.nic_ranks import NicSubject, Rank
from mkernel.harness.outcome import CheckFailed
from mkernel.topology.cost import MachineConstants

_ROUNDS = 2000
_PUTS = 200
_COPY_BYTES = 8 << 20
_COPIES = 24
_PUT_BYTES = 1 << 20
_SIZES = (1024, 512, 256)
_LONG_ENOUGH_S = 0.05
_SIGNALS = 64
_DEADLINE_S = 20.0


@dataclass(frozen=True)
class LinkFigures:
    """One direction between two processes: GB/s of big messages, microseconds of a small one."""

    gbs: float
    latency_us: float


def measure(ranks: int, nic: str, verbs: str) -> MachineConstants:
    """Measure the constants of a rank of accelerator ``streams`` on this machine's CPU.

    Args:
        ranks: number of ranks that share the cores. nic, verbs: NIC backend and provider between
            nodes.

    Raises:
        UnknownBackend, BackendUnavailable: the NIC cannot be used here.
    """
    subject = NicSubject(nic, verbs)
    subject.port()
    try:
        memory = subject.run(_through_memory, 2)[0]
        wire = subject.run(_through_nic, 2)[0]
    except CheckFailed as failed:
        raise BackendUnavailable(f"{subject} cannot be measured: {failed}") from failed
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rates = {
            dtype: _matmul_tflops(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)
        }
        memory_gbs = _memory_gbs()
        launch_us = _launch_us()
    finally:
        torch.set_num_threads(before)
    host = platform.node() or "this machine"
    return MachineConstants(
        name=f"measured on {host}",
        source=f"{host}: {threads} threads of {platform.machine()} a rank, {ranks} ranks; "
        f"shared memory between processes; NIC {nic} on {verbs} verbs; torch {torch.__version__}; "
        f"{time.strftime('%Y-%m-%d', time.gmtime())}",
        float16_tflops_per_core=rates[torch.float16],
        bfloat16_tflops_per_core=rates[torch.bfloat16],
        float32_tflops_per_core=rates[torch.float32],
        memory_gbs=memory_gbs,
        p2p_gbs=memory.gbs,
        p2p_latency_us=memory.latency_us,
        nic_gbs=wire.gbs,
        nic_most_gbs=wire.gbs,
        nic_latency_us=wire.latency_us,
        comm_block_gbs=memory.gbs,
        signal_us=memory.latency_us,
        launch_us=launch_us,
    )


def _seconds(work: Callable[[], object]) -> float:
    """Return the median time of one run of ``work``, over enough runs for the clock's resolution."""
    work()
    taken: list[float] = []
    while len(taken) < 3 or (sum(taken) < _LONG_ENOUGH_S and len(taken) < 1000):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _matmul_tflops(dtype: torch.dtype) -> float:
    """Return the best of a few sizes; large ones are tried only while small ones are fast enough."""
    best = 0.0
    for size in reversed(_SIZES):
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        taken = _seconds(lambda a=a, b=b: torch.mm(a, b))  # type: ignore[misc]
        best = max(best, 2.0 * size**3 / taken / 1e12)
        if taken > _LONG_ENOUGH_S:
            break
    return best


def _memory_gbs() -> float:
    """Return the rate of bytes read and written by a copy that exceeds the caches."""
    source = torch.ones(64 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source)) / 1e9


def _launch_us() -> float:
    """Return the time of one small torch call: what a call costs before any work."""
    a = torch.ones(8, 8)
    return 1e6 * _seconds(lambda: torch.mm(a, a))


def _through_memory(me: Rank) -> LinkFigures:
    """Measure round trips of signals, and signalled copies, through memory that both processes map."""
    pad_bytes = _transport.pad_bytes(_SIGNALS)
    own = HostMemory.create(pad_bytes + _COPY_BYTES)
    try:
        _transport.pad_format(own.address, _SIGNALS)
        theirs = HostMemory.attach(me.exchange(own.export())[1 - me.rank])
        try:
            me.exchange()
            source = ctypes.create_string_buffer(_COPY_BYTES)

            def copy() -> None:
                ctypes.memmove(theirs.address + pad_bytes, source, _COPY_BYTES)

            return _figures(
                me,
                own.address,
                lambda: _transport.pad_add(theirs.address, 0, 1),
                lambda: _transport.pad_add(theirs.address, 1, 1),
                copy,
                _COPY_BYTES,
                _COPIES,
            )
        finally:
            me.exchange()
            theirs.close()
    finally:
        own.close()


def _through_nic(me: Rank) -> LinkFigures:
    """Measure the same by puts of a NIC session."""
    with me.open(2 * _PUT_BYTES) as port:
        peer = 1 - me.rank

        def put(nbytes: int, signal: int) -> None:
            port.session.put(peer, 0, 0, _PUT_BYTES, nbytes, signal, 1)

        return _figures(
            me,
            port.pad,
            lambda: put(8, 0),
            lambda: put(_PUT_BYTES, 1),
            lambda: None,
            _PUT_BYTES,
            _PUTS,
        )


def _figures(
    me: Rank,
    pad: int,
    tell: Callable[[], None],
    tell_of_copy: Callable[[], None],
    copy: Callable[[], None],
    nbytes: int,
    copies: int,
) -> LinkFigures:
    """Measure one link: rank 0 sends and waits for replies. ``tell`` raises the peer's signal 0;
    ``copy`` followed by ``tell_of_copy`` raises signal 1 after ``nbytes`` have arrived."""

    def wait(signal: int, value: int) -> None:
        if _transport.pad_wait(pad, signal, value, _DEADLINE_S) != _transport.WaitResult.ok:
            raise BackendUnavailable(f"rank {me.rank}: no answer within {_DEADLINE_S:g} s")

    round_trips = []
    for number in range(1, _ROUNDS + 1):
        start = time.perf_counter()
        if me.rank == 0:
            tell()
            wait(0, number)
        else:
            wait(0, number)
            tell()
        round_trips.append(time.perf_counter() - start)
    me.exchange()
    start = time.perf_counter()
    if me.rank == 0:
        for _ in range(copies):
            copy()
            tell_of_copy()
        wait(0, _ROUNDS + 1)
    else:
        wait(1, copies)
        tell()
    answered = time.perf_counter() - start
    me.exchange()
    return link_figures(round_trips, copies * nbytes, answered)


def link_figures(round_trips_s: Sequence[float], nbytes: int, answered_s: float) -> LinkFigures:
    """Return the figures of one direction of a link, from times seen by one end.

    Args:
        round_trips_s: seconds of a small message there and one back; a direction takes half.
        answered_s: seconds until the reply to ``nbytes`` arrived: the bytes' time, and one latency
            back.
    """
    latency_s = statistics.median(round_trips_s) / 2
    return LinkFigures(nbytes / (answered_s - latency_s) / 1e9, 1e6 * latency_s)
