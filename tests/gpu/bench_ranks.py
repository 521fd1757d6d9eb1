"""What rank processes of the benchmark's own tests run: its clock, its flush and its stopwatches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.distributed import HashStore

from mkernel.harness.clock import Meeting, calibrated
from mkernel.harness.contenders.nccl_windows import NcclWindows
from mkernel.harness.problem import Inputs, Tensors
from mkernel.harness.protocol import Clock, stopwatch
from mkernel.harness.queue import CudaQueue

MIB = 1 << 20
HOST_S = 3e-3
"""What the host does in a call, where its part is looked for."""


class WatchedWindows(NcclWindows):
    """Fails where no symmetric kernel of NCCL's runs in a call."""

    name = "watched_windows"

    def call(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as watched:
            found = super().call(inputs, outputs)
            torch.cuda.synchronize()
        names = [each.key for each in watched.key_averages()]
        assert any("ncclSym" in name for name in names), names
        return found


def device() -> torch.device:
    """This rank's."""
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process, for the barriers of a stopwatch."""
    distributed.init_process_group(
        "nccl", store=HashStore(), rank=0, world_size=1, device_id=device()
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def clocks() -> list[tuple[int, int]]:
    """Offsets and errors of calibrations, 20 ms apart; nanoseconds."""
    from mkernel.backends.accelerators.cuda import _cuda

    clock = _cuda.DeviceClock(torch.cuda.current_device())
    stream = torch.cuda.current_stream().cuda_stream
    found = []
    for _ in range(6):
        each = calibrated(clock.read(16, 10.0, stream=stream))
        found.append((each.offset_ns, each.error_ns))
        time.sleep(0.02)
    return found


def holds() -> list[tuple[float, float]]:
    """By hold: how much later than asked it ended (us), and how long it took the device (s)."""
    queue = CudaQueue(device(), 10.0)
    found = []
    for _ in range(12):
        assert queue.calibrate()
        instant = time.monotonic_ns() + 5_000_000
        queue.start()
        queue.hold(instant)
        queue.end()
        queue.synchronize()
        found.append(((queue.held_until() - instant) / 1e3, queue.seconds()))
    return found


def held_too_long() -> float:
    """Seconds until a hold gives up whose instant is an hour away."""
    from mkernel.backends.accelerators.cuda import _cuda

    clock = _cuda.DeviceClock(torch.cuda.current_device())
    stream = torch.cuda.current_stream().cuda_stream
    now = clock.read(1, 10.0, stream=stream)[0][1]
    began = time.monotonic()
    clock.hold(now + 3_600_000_000_000, 0.05, stream=stream)
    torch.cuda.synchronize()
    return time.monotonic() - began


def reads(turns: int = 15) -> dict[str, float]:
    """Microseconds (median) of searches, each a chain of reads that wait for one another, in memory
    that fits the cache: when it was read just before, and after a flush."""
    queue = CudaQueue(device(), 10.0)
    memory = torch.linspace(0, 1, 4 * MIB, device=device())
    values = torch.rand(1024, device=device())
    out = torch.empty(1024, dtype=torch.int64, device=device())

    def read() -> None:
        torch.searchsorted(memory, values, out=out)

    return {
        "warm": _median_us(queue, read, read, turns),
        "flushed": _median_us(queue, read, queue.flush, turns),
    }


def products(turns: int = 15) -> dict[str, float]:
    """Microseconds (median) of a product of few rows by weights of about the cache's size, after a
    pass that only writes, and after a flush."""
    queue = CudaQueue(device(), 10.0)
    dirty = torch.empty(256 * MIB, dtype=torch.uint8, device=device())
    a = torch.randn(16, 7168, device=device(), dtype=torch.bfloat16)
    b = torch.randn(7168, 4096, device=device(), dtype=torch.bfloat16)
    out = torch.empty(16, 4096, device=device(), dtype=torch.bfloat16)

    def product() -> None:
        torch.matmul(a, b, out=out)

    return {
        "dirty": _median_us(queue, product, dirty.zero_, turns),
        "flushed": _median_us(queue, product, queue.flush, turns),
    }


def _median_us(
    queue: CudaQueue, work: Callable[[], object], before: Callable[[], object], turns: int
) -> float:
    times = []
    for _ in range(turns + 3):
        before()
        queue.spin(1e-3)  # the host has queued all by then
        queue.start()
        work()
        queue.end()
        queue.synchronize()
        times.append(queue.seconds() * 1e6)
    return statistics.median(times[3:])


def timed(clock: Clock, turns: int = 9) -> dict[str, Any]:
    """Medians of a stopwatch's seconds: of a spin of the device, and of nothing but host work; the
    spin's by plain events; whether results were copied behind the call; how late starts were (us)."""
    spin: Any = torch.cuda
    data = torch.zeros(4 * MIB, device=device())
    plain = CudaQueue(device(), 10.0)
    plain.spin(1e-3)
    plain.synchronize()
    plain.start()
    plain.spin(1e-3)
    plain.end()
    plain.synchronize()

    def device_work() -> tuple[Tensors]:
        spin._sleep(int(1e-3 * 1.98e9))
        return ({"out": data.add_(1)},)

    def host_work() -> tuple[Tensors]:
        time.sleep(HOST_S)
        return ({"out": data},)

    with alone():
        watch = stopwatch(device(), clock, Meeting(HashStore(), 0, 1), 10.0)
        seconds = []
        right = True
        for turn in range(turns):
            found = watch.time("device", device_work)
            seconds.append(found.seconds)
            right = right and bool((found.results[0]["out"] == turn + 1).all())
        host = [watch.time("host", host_work).seconds for _ in range(turns)]
        late = watch.time("device", device_work, late=True).seconds
    return {
        "plain": plain.seconds(),
        "device": statistics.median(seconds),
        "host": statistics.median(host),
        "late": late,
        "right": right,
        "settings": watch.settings(),
    }
