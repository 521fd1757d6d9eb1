"""One order for what all worlds of a process do on its device.

Kernels of two worlds that wait for their peers at the same time stand still for good where ranks
started them in opposite order. So a process makes one call after another, whatever world or thread it
comes from, and where calls are only queued the device runs them in that order too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple

import torch

from mkernel.errors import Timeout, Unsupported, WorldError

_being_made: list[str] = []


@contextlib.contextmanager
def making(world: str) -> Iterator[None]:
    """Record that this process makes a world of that name while it is entered."""
    _being_made.append(world)
    try:
        yield
    finally:
        _being_made.remove(world)


class Queued(NamedTuple):
    """The stream where the last call was queued, and the world of that call. ``event``: recorded after
    it; None where it is recorded when it is needed: while capturing, when an event belongs to one
    capture only, and after calls that native code queued."""

    world: str
    stream: Any
    event: Any


class DeviceOrder:
    """The order of this process's calls on one kind of device. Made by :func:`order_of`.

    Attributes:
        under_way: names of the worlds whose calls are being made, the innermost last.
        turns: of the worlds that there are.
        last: the last call, by whether it was captured into a graph; while there are several worlds.
    """

    def __init__(self, device: str) -> None:
        self.lock = threading.RLock()
        self.under_way: list[str] = []
        self.turns: set[Turns] = set()
        self._device = device
        self.last: dict[bool, Queued] = {}

    def join(self, turns: Turns) -> None:
        """Record that a world begins. What other worlds have queued is over when this returns: while
        a world is alone nobody notes where it queues its calls."""
        with self.lock:
            self._drain(list(self.turns))
            self.last.clear()
            self.turns.add(turns)

    def leave(self, turns: Turns) -> None:
        """Record that a world has ended."""
        with self.lock:
            self.turns.discard(turns)

    def follow(self, world: str) -> None:
        """Make what is queued on the current stream from now on come after the last call of other
        worlds.

        A call that is being captured comes after those of the same capture; replays of graphs are
        ordered by their streams alone.

        Raises:
            Unsupported: another capture, which has not ended yet, holds the last call.
        """
        if len(self.turns) < 2:
            return
        module = torch.get_device_module(self._device)
        stream, captured = module.current_stream(), capturing(module)
        last = self.last.get(captured)
        if last is None or last.stream == stream or last.world == world:
            return
        if not captured:
            self._after(last, stream)
            return
        with module.stream(last.stream):
            if not capturing(module):
                return  # that capture is over: its graph is ordered by its stream
        try:
            stream.wait_event(last.stream.record_event())
        except RuntimeError as error:
            raise Unsupported(
                f"a call of world {world!r} is captured while another capture holds a call of world "
                f"{last.world!r}, so that nothing would order their graphs; capture one after the other"
            ) from error

    def _after(self, last: Queued, stream: Any) -> None:
        event = last.event
        if event is None:
            module = torch.get_device_module(self._device)
            with module.stream(last.stream):
                captures = capturing(module)  # by now: an event would be of that capture
            if captures:
                self._drain([turns for turns in self.turns if turns.world == last.world])
                return
            event = last.stream.record_event()
        stream.wait_event(event)

    def _drain(self, worlds: Iterable[Turns]) -> None:
        for each in worlds:
            with contextlib.suppress(WorldError):  # it hears of it at its own next call
                each.drain()

    def queued(self, world: str) -> None:
        """Record that a call has been queued on the current stream."""
        if len(self.turns) < 2:
            return
        module = torch.get_device_module(self._device)
        stream, captured = module.current_stream(), capturing(module)
        event = None if captured else stream.record_event()
        self.last[captured] = Queued(world, stream, event)


def capturing(module: Any) -> bool:
    """Return whether the current stream of a device is being captured. ``module``: torch's functions
    for that device."""
    asked = getattr(module, "is_current_stream_capturing", None)
    return asked is not None and bool(asked())


@cache
def order_of(device: str) -> DeviceOrder:
    """Return the order of this process's calls on the devices that torch calls ``device``."""
    return DeviceOrder(device)


def _nothing() -> None:
    pass


class Turns:
    """One world's turns in the order of its device. Entered around whatever the world does there.

    Any thread; a thread that has its turn may enter again.

    Args:
        limit_s: how long another world may keep its turn.
        drain: returns once all that this world has queued is over.
        tell: lets the other ranks know of an error.

    Attributes:
        order: of all worlds on this type of device.
    """

    def __init__(
        self,
        device: str,
        world: str,
        limit_s: Callable[[], float],
        drain: Callable[[], None],
        tell: Callable[[BaseException], None],
    ) -> None:
        self.device = device
        self.world = world
        self.order = order_of(device)
        self._limit_s = limit_s
        self._tell = tell
        self.drain = drain

    def __enter__(self) -> None:
        order = self.order
        if not order.lock.acquire(blocking=False) and not order.lock.acquire(
            timeout=self._limit_s()
        ):
            raise self._late()
        order.under_way.append(self.world)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.order.under_way.pop()
        self.order.lock.release()

    def join(self) -> None:
        """Record that the world begins to make calls."""
        self.order.join(self)

    def leave(self) -> None:
        """Record that the world makes no call any more."""
        self.order.leave(self)
        self.drain = _nothing  # which refers to the world

    def follow(self) -> None:
        """Order what is queued from now on, as :meth:`DeviceOrder.follow` does."""
        self.order.follow(self.world)

    def queued(self) -> None:
        """Record a queued call, as :meth:`DeviceOrder.queued` does."""
        self.order.queued(self.world)

    def elsewhere(self) -> str:
        """Return the other world that this process is calling or making; empty: there is none. Any
        thread."""
        busy = (*self.order.under_way[-1:], *_being_made[-1:])
        return next((world for world in busy if world != self.world), "")

    def _late(self) -> Timeout:
        error = Timeout(
            f"a call of world {self.world!r} waited {self._limit_s():g} s for a call of world "
            f"{self.elsewhere() or self.world!r} that another thread of this process makes; ranks "
            "that share several worlds call them in one order"
        )
        self._tell(error)
        return error
