"""Calls that a world has run before: native code starts them without Python
(``backends/runtime/known/known_calls.hpp``)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from mkernel.backends.contracts.accelerator import Launch
from mkernel.world.order import Queued, Turns
from mkernel.world.torch_state import native_functions

_INTERFACE = 6
"""The interface of the native module that this one is written for."""

if TYPE_CHECKING:
    from mkernel.backends.runtime._known_calls import KnownCalls


def known_calls(
    calls: object, failure: object, running: deque[Launch], turns: Turns, pad: int
) -> KnownCalls | None:
    """Make what starts one world's calls without Python. None: this torch, or this build, has no way.

    Args:
        calls, failure: the world's Calls and FailureMonitor, whose state it reads and moves on.
    """
    functions = native_functions(turns.device)
    try:
        from mkernel.backends.runtime import _known_calls as native
    except ImportError:  # native modules of an older build
        return None
    if getattr(native, "INTERFACE", 0) != _INTERFACE:
        return None
    if functions is None:
        return None
    try:
        return native.KnownCalls(
            functions=functions,
            failure=failure,
            calls=calls,
            running=running,
            lock=turns.order.lock,
            under_way=turns.order.under_way,
            worlds=turns.order.turns,
            last=turns.order.last,
            queued=Queued,
            name=turns.world,
            pad=pad,
        )
    except NotImplementedError:  # torch's exchange table is of another kind
        return None


def learn(
    known: KnownCalls,
    signature: bytes,
    launch: Launch,
    key: str,
    allocation: tuple[Any, tuple[Any, ...]],
    counter: bytearray,
) -> None:
    """Let native code start calls of this signature as ``launch`` was started, from now on.

    Args:
        key: of the agreement. allocation: (function, arguments) that make an output of such a call.
        counter: of such calls (8 bytes).
    """
    again = launch.again()
    starter: Any = None if again is None else again.starter
    launches = None if again is None else again.launches
    allocate, arguments = allocation
    known.learn(signature, starter, launches, key, allocate, arguments, counter)
