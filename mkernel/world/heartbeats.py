"""Heartbeats of a world's ranks, and the table of one node's, in memory that its ranks share.

A row is all heartbeats of a node as one message, which one of its ranks publishes for the others.
"""

from __future__ import annotations

import json
import math
import struct
import threading
import zlib
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from mkernel.backends.runtime.host_memory import HostMemory
from mkernel.errors import Untrusted

_MOST_NAME = 100
_SLOT_BYTES = 2048
"""Holds a report of which each character of the name takes twelve bytes as JSON, the most there are."""
_HEADER_BYTES = 64
_PREFIX = struct.Struct("<II")  # bytes of the report, and their CRC-32
_KEEP_OUT = "keep strangers from the store's port"


@dataclass(frozen=True)
class Heartbeat:
    """A rank's report of itself.

    Attributes:
        beat: how often the rank has reported; 0: never.
        left: whether it has left the world on purpose.
        call, plan: number and key of its latest call; the key is empty until all ranks agreed on it.
        busy_call, busy_with: the last time that another world kept it busy: the number of its latest
            call then, and that world's name; empty: none has.
    """

    beat: int = 0
    left: bool = False
    call: int = 0
    plan: str = ""
    busy_call: int = 0
    busy_with: str = ""


_NONE = Heartbeat()
Row = tuple[Heartbeat, ...]
"""The heartbeats of a node, by local rank."""


def unreported(ranks: int) -> Row:
    """Return the row of a node of so many ranks, none of which has reported yet."""
    return (_NONE,) * ranks


def reported(row: Row) -> bool:
    """Return whether a rank of a row has reported."""
    return any(heartbeat.beat for heartbeat in row)


def newest(one: Row, other: Row) -> Row:
    """Return the newer heartbeat of each rank."""
    return tuple(max(pair, key=lambda each: each.beat) for pair in zip(one, other, strict=True))


def row_to_json(row: Row) -> list[tuple[Any, ...]]:
    """Return a JSON-safe form of a row."""
    return [astuple(heartbeat) for heartbeat in row]


def next_row(node: int, latest: Row, told: Any) -> Row:
    """Read the row of ``node`` that the store has now (JSON), after it had ``latest``.

    Raises:
        Untrusted: no rank writes that, or it is older than ``latest``.
    """
    types = [type(value) for value in astuple(_NONE)]
    try:
        if len(told) != len(latest):
            raise TypeError(f"{len(told)} heartbeats of {len(latest)} ranks")
        for each in told:
            if [type(value) for value in each] != types:
                raise TypeError(f"{each!r:.200}")
    except TypeError as error:
        raise Untrusted(f"heartbeats of node {node} that no rank writes: {error}") from error
    row = tuple(Heartbeat(*each) for each in told)
    for rank, heartbeat in enumerate(row):
        if heartbeat.beat < latest[rank].beat:
            raise Untrusted(
                f"heartbeat {heartbeat.beat} of rank {node * len(row) + rank} was put in the place of "
                f"its heartbeat {latest[rank].beat}; {_KEEP_OUT}"
            )
    return row


def deleted(node: int) -> Untrusted:
    """Return the error of a node's row that was deleted."""
    return Untrusted(f"the heartbeats of node {node} were deleted; {_KEEP_OUT}")


class Report(NamedTuple):
    """A rank's heartbeat on its node's table.

    Attributes:
        at: when it was written, in seconds of CLOCK_MONOTONIC, which a node's ranks share.
        looked: when the rank last began to ask the store for an abort notice and found none.
    """

    heartbeat: Heartbeat = _NONE
    at: float = -math.inf
    looked: float = -math.inf


class _TableMemory(HostMemory):
    NAME = "mkernel-heartbeats"


class HeartbeatTable:
    """The table of a node's heartbeats: a slot a rank, which that rank alone writes, and a mark that
    the world has failed.

    A report that is read while it is written does not fit its checksum; then the one before counts. A
    rank that was stopped may still write here when the others have given the world up: nothing else
    ever lies in this memory.
    """

    def __init__(self, memory: HostMemory, ranks: range) -> None:
        """Use ``memory``, zeroed when it was made, as the table of ``ranks``."""
        self.ranks = ranks
        self._memory = memory
        self._bytes = memory.view()
        self._latest = dict.fromkeys(ranks, Report())
        self._reading = threading.Lock()  # or a slow thread puts back what it read long ago

    @classmethod
    def create(cls, ranks: range) -> HeartbeatTable:
        """Make the table of these ranks. OSError: memory is short."""
        return cls(_TableMemory.create(_HEADER_BYTES + len(ranks) * _SLOT_BYTES), ranks)

    @classmethod
    def attach(cls, descriptor: dict[str, Any], ranks: range) -> HeartbeatTable:
        """Map the table that another rank of the node exported. OSError: it is gone."""
        return cls(HostMemory.attach(descriptor), ranks)

    def export(self) -> dict[str, Any]:
        """Return what ``attach`` takes; JSON-safe, valid until ``close``."""
        return self._memory.export()

    def close(self) -> None:
        """Let go of the memory. Who still reads or writes the table may go on."""
        self._memory.close()

    @property
    def failed(self) -> bool:
        """Return whether a rank of the node knows that the world has failed."""
        return self._bytes[0] != 0

    def mark_failed(self) -> None:
        """Let the other ranks of the node look for the abort notice. Any thread."""
        self._bytes[0] = 1

    def write(self, rank: int, report: Report) -> None:
        """Write the report of this process's rank."""
        heartbeat, at, looked = report
        body = json.dumps([at, looked, *astuple(heartbeat)]).encode()
        slot = self._slot(rank)
        self._bytes[slot : slot + _PREFIX.size + len(body)] = (
            _PREFIX.pack(len(body), zlib.crc32(body)) + body
        )

    def read(self) -> dict[int, Report]:
        """Return the latest report of each rank. Any thread."""
        with self._reading:
            for rank in self.ranks:
                slot = self._slot(rank)
                length, checksum = _PREFIX.unpack_from(self._bytes, slot)
                body = bytes(self._bytes[slot + _PREFIX.size :][:length])
                if length and zlib.crc32(body) == checksum:
                    at, looked, *heartbeat = json.loads(body)
                    self._latest[rank] = Report(Heartbeat(*heartbeat), at, looked)
            return dict(self._latest)

    def row(self) -> Row:
        """Return the latest heartbeats by local rank. Any thread."""
        return tuple(report.heartbeat for report in self.read().values())

    def _slot(self, rank: int) -> int:
        return _HEADER_BYTES + self.ranks.index(rank) * _SLOT_BYTES


def shown(name: str) -> str:
    """Return the part of a world's name that fits a heartbeat."""
    return name[:_MOST_NAME]
