"""Counts of what a process holds and a world must give back: descriptors, threads, shared mappings."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_KEPT = {"ascend-core"}
"""Names of threads that a simulator keeps for its next call, in whatever world."""
_NUMBERS = re.compile(r"\d+")


def held() -> Counter[str]:
    """Count what this process holds, by name."""
    found: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            found["descriptor " + _NUMBERS.sub("N", os.readlink(f"/proc/self/fd/{entry}"))] += 1
    for name in _thread_names():
        found[f"thread {name}"] += name not in _KEPT
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if fields[1].endswith("s"):
            found["shared mapping " + _NUMBERS.sub("N", fields[5] if len(fields) > 5 else "")] += 1
    return found


def _thread_names() -> Iterator[str]:
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it ended
            yield Path(f"/proc/self/task/{task}/comm").read_text().strip()


def settled(before: Counter[str], patience_s: float) -> Counter[str]:
    """Return what is held, once that is no more than ``before``, or has had time to be. One look
    decides: what a thread holds for a moment, as one that writes of a broken world, must not be in it.
    """
    late = time.monotonic() + patience_s
    while (now := held()) - before and time.monotonic() < late:
        time.sleep(0.02)
    return now


def more_than(before: Counter[str], patience_s: float) -> list[str]:
    """Report what is held beyond ``before``, once that has had time to go."""
    gc.collect()  # an error's traceback may be what still holds a world
    more = settled(before, patience_s) - before
    return [f"{count} more of {what}" for what, count in sorted(more.items())]


def own_bytes() -> int:
    """Return the bytes of this process's own memory: neither files nor shared pages."""
    fields = [int(field) for field in Path("/proc/self/statm").read_text().split()]
    return (fields[1] - fields[2]) * resource.getpagesize()
