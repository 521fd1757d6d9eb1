"""Mistakes that a rank makes on purpose, so that the judge can be seen to catch them."""

from __future__ import annotations

import os
import threading
from typing import Literal

from campaigns.dead_memory import SYMMETRIC

from mkernel.cases import Outcome
from mkernel.world.world import World

Planted = Literal[
    "leak",
    "wrong-element",
    "wrong-in-group",
    "silence",
    "late-write",
    "leak-a-call",
    "growth",
    "lost-epoch",
]
GROWTH_BYTES = 2 << 20
_leaked: list[int] = []
_grown: list[bytes] = []


def spoil(planted: Planted | None, outcome: Outcome, *, in_group: bool = False) -> None:
    """Spoil one element of the result of a call that has ended."""
    if planted == ("wrong-in-group" if in_group else "wrong-element"):
        result = next(each for each in outcome.outputs.values() if each.is_floating_point())
        result.view(-1)[result.numel() // 2] += 1


def write_late(planted: Planted | None) -> None:
    """Write into memory of another rank, once this rank knows that its world is broken."""
    if planted != "late-write":
        return
    for number in os.listdir("/proc/self/fd"):
        name = os.readlink(path) if os.path.lexists(path := f"/proc/self/fd/{number}") else ""
        owner = SYMMETRIC.fullmatch(name)
        if owner is not None and int(owner[1]) != os.getpid():
            os.pwrite(int(number), b"late", 4096)
            return
    raise AssertionError("no memory of another rank is mapped here")


def keep(planted: Planted | None) -> None:
    """Keep what a call should have given back: a descriptor, or ``GROWTH_BYTES`` of memory."""
    if planted == "leak-a-call":
        _leaked.append(os.memfd_create("mkernel-planted"))
    elif planted == "growth":
        _grown.append(os.urandom(1) * GROWTH_BYTES)


def lose_an_epoch(planted: Planted | None, world: World) -> None:
    """Have this rank's next call of a world take the number of the last one."""
    if planted == "lost-epoch":
        world._calls._launched -= 1


def misbehave(planted: Planted | None) -> None:
    """Leak or hang before a world is left."""
    if planted == "leak":
        _leaked.append(os.memfd_create("mkernel-planted"))
    elif planted == "silence":
        threading.Event().wait()
