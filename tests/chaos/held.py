"""What a process holds that a world must give back: descriptors, threads, shared mappings."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

_KEPT = {"ascend-core"}
"""Names of threads that a simulator keeps for its next call, in whatever world."""
_NUMBERS = re.compile(r"\d+")


def held() -> Counter[str]:
    """How many of each."""
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


def sockets() -> dict[str, str]:
    """What each socket of this process is, by its name among descriptors: kind, addresses, state."""
    known = {}
    for kind in ("tcp", "tcp6", "udp", "udp6", "unix"):
        with contextlib.suppress(OSError):  # a kernel without that kind
            lines = Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:]
            for fields in map(str.split, lines):
                inode, told = (6, fields[7:]) if kind == "unix" else (9, fields[1:4])
                known[f"socket:[{fields[inode]}]"] = " ".join([kind, *told])
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (name := os.readlink(f"/proc/self/fd/{entry}")).startswith("socket:"):
                found[name] = known.get(name, "of another kind")
    return found


def new_sockets(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Those that are new, in words: addresses and states of TCP are hexadecimal, as /proc has them."""
    return ", ".join(sorted(what for name, what in now.items() if name not in before))


def more_than(before: Counter[str], patience_s: float, known: Mapping[str, str]) -> list[str]:
    """What is held beyond ``before``, once that has had time to go. ``known``: the sockets of then."""
    gc.collect()  # an error's traceback may be what still holds a world
    end = time.monotonic() + patience_s
    while (more := held() - before) and time.monotonic() < end:
        time.sleep(0.02)
    told = [f"{count} more of {what}" for what, count in sorted(more.items())]
    if told and (new := new_sockets(known, sockets())):
        told.append(f"new sockets ({new})")
    return told


def own_bytes() -> int:
    """Of this process's own memory: neither files nor shared pages."""
    fields = [int(field) for field in Path("/proc/self/statm").read_text().split()]
    return (fields[1] - fields[2]) * resource.getpagesize()
