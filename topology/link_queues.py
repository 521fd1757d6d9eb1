"""A discrete-event simulation of messages that queue for links.

A link serves messages in the order in which they arrive at it. A message streams through its links
(cut-through): the next link starts when it can keep up to the last byte, and is busy only for its
own time. It arrives a latency after its last link. Messages may wait for others to arrive: that is
how schedules are written. Times are microseconds from the start; every result is a *prediction*.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HopTimes = Sequence[tuple[int, float]]
"""The links of a subflow in order, with the microseconds for which the message occupies each."""


@dataclass(eq=False, slots=True)
class Message:
    """Bytes from one rank to another.

    Attributes:
        name: for timelines.
        subflows: the ways that its parts take at the same time; without any, it arrives when it is
            ready.
        latency_us: from the end of the last link to the moment at which the receiver sees it.
        ready_us: earliest time of sending; moved later by the messages that it waits for.
        arrived_us: set by :func:`run`.
    """

    name: str
    subflows: Sequence[HopTimes]
    latency_us: float
    ready_us: float = 0.0
    arrived_us: float = 0.0
    _waits: int = 0
    _wakes: list[Message] = field(default_factory=list)
    _parts: int = 0

    def after(self, other: Message) -> None:
        """Send only when ``other`` has arrived. To be called before :func:`run`."""
        self._waits += 1
        other._wakes.append(self)


class Busy(NamedTuple):
    """An interval in which a link serves a message."""

    message: Message
    start_us: float
    duration_us: float


class _Event(NamedTuple):
    """A part of a message that reaches a link, or its end."""

    at: float
    order: int
    message: Message
    rest: HopTimes


def run(
    messages: Sequence[Message], links: int, trace: list[list[Busy]] | None = None
) -> list[float]:
    """Carry all messages; return the time for which each link was busy.

    ``trace``: one list per link, filled with the intervals in which it was busy.

    Raises:
        ValueError: messages wait for one another in a circle.
    """
    free = [0.0] * links
    busy = [0.0] * links
    events: list[_Event] = []
    order = arrived = 0
    ready = [message for message in messages if not message._waits]
    while ready or events:
        for message in ready:
            message._parts = max(1, len(message.subflows))
            for subflow in message.subflows or ((),):
                heapq.heappush(events, _Event(message.ready_us, order, message, subflow))
                order += 1
        ready = []
        at, number, message, rest = heapq.heappop(events)
        if rest:
            link, duration = rest[0]
            start = max(at, free[link])
            free[link] = end = start + duration
            busy[link] += duration
            if trace is not None and duration:
                trace[link].append(Busy(message, start, duration))
            following = rest[1][1] if len(rest) > 1 else 0.0
            heapq.heappush(events, _Event(max(start, end - following), number, message, rest[1:]))
            continue
        message._parts -= 1
        if message._parts:
            continue
        arrived += 1
        message.arrived_us = at + message.latency_us
        for woken in message._wakes:
            woken._waits -= 1
            woken.ready_us = max(woken.ready_us, message.arrived_us)
            if not woken._waits:
                ready.append(woken)
    if arrived < len(messages):
        stuck = next(message for message in messages if message._waits)
        raise ValueError(f"message {stuck.name!r} waits for messages that never arrive")
    return busy
