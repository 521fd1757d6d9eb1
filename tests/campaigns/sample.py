"""What a rank holds at one moment of a life: memory, descriptors, threads; how far its worlds are."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from campaigns.held import held, settled

from mkernel.backends.accelerators.cuda.native import pci_address
from mkernel.world.world import World

_PATIENCE_S = 10.0
"""What a thread or a connection that ends by itself may take."""
_MEMORY = {"own": "RssAnon", "files": "RssFile", "shared": "RssShmem"}


class _Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``, summed over all arenas."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


_libc = ctypes.CDLL("libc.so.6")
_libc.mallinfo2.restype = _Mallinfo2


class Progress(NamedTuple):
    """How many calls a rank's world has made, three times: the number that ranks agree on, the epoch
    that backends were given last, and the sum of what is counted by op. Where none was refused, and
    no companion ran any, all are the same."""

    number: int
    epoch: int
    counted: int


class Sample(NamedTuple):
    """One rank, when nothing of its calls was under way.

    Attributes:
        calls: that it has judged in this life. at: seconds by CLOCK_MONOTONIC.
        memory: bytes by kind: ``heap`` that malloc has given out; ``own``, ``files``, ``shared`` that
            are resident; ``device`` as torch allocated them there, ``device_process`` as the driver
            counts them for this process, where it does, ``device_used`` as it counts them for all.
        held: descriptors, threads and shared mappings by name.
        worlds: by the world's name in the life.
    """

    calls: int
    at: float
    memory: Mapping[str, int]
    held: Counter[str]
    worlds: Mapping[str, Progress]


def take(calls: int, worlds: Mapping[str, World], before: Counter[str] | None = None) -> Sample:
    """A sample of this process. ``before``: what it held when the life was warm; more than that gets
    a while to go. Memory that is free is given back to the system first, so that what is resident
    is in use."""
    gc.collect()
    _libc.malloc_trim(0)
    memory, now = _memory(), held() if before is None else settled(before, _PATIENCE_S)
    counts = {name: progress(world) for name, world in worlds.items()}
    return Sample(calls, time.monotonic(), memory, now, counts)


def progress(world: World) -> Progress:
    """Of a world whose calls are over."""
    return Progress(
        world._failure.call[0], world._calls._launched, sum(world.statistics().calls.values())
    )


def _memory() -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    heap = _libc.mallinfo2()
    found = {"heap": heap.uordblks + heap.hblkhd}
    for name, field in _MEMORY.items():
        told = re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)
        assert told is not None, f"/proc/self/status has no {field}"
        found[name] = int(told[1]) << 10
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        found["device"], found["device_used"] = torch.cuda.memory_allocated(), total - free
        if (driver := _of_process()) is not None:
            found["device_process"] = driver
    return found


def _of_process() -> int | None:
    """Bytes of its device that the driver counts for this process; None where it does not say."""
    import pynvml

    try:
        device = _nvml_device(torch.cuda.current_device())
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    except pynvml.NVMLError:  # some containers may not ask for processes
        return None
    used = [each.usedGpuMemory for each in running if each.pid == os.getpid()]
    return None if None in used or not used else int(sum(used))


@functools.cache
def _nvml_device(device: int) -> Any:
    """NVML's handle of a device; initialises NVML for as long as the process lives."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByPciBusId(pci_address(device))
