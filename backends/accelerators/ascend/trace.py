"""The trace blob of sim/trace.hpp from Python, for schedules in the timed model that none of our
kernels runs."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt


class Kind(IntEnum):
    """The kinds of instructions: ``sim::Kind``."""

    TLOAD = 0
    TSTORE = 1
    TEXTRACT = 2
    TMATMUL = 3
    TMATMUL_ACC = 4
    TPUT = 5
    TNOTIFY = 6
    TWAIT = 7
    NIC_PUT = 8
    SET_FLAG = 9
    WAIT_FLAG = 10
    FENCE = 11
    TADD = 12
    TCVT = 13
    TSUB = 14
    TMUL = 15
    TMAX = 16
    TMULS = 17
    TEXP = 18
    TLOG = 19
    TFILL = 20
    TTRIL = 21
    TROWMAX = 22
    TROWSUM = 23
    TROWEXPANDSUB = 24
    TROWEXPANDMUL = 25
    TROWEXPANDDIV = 26
    SCALAR = 27
    TGET = 28


class Pipe(IntEnum):
    """The pipes of a core: ``isa::Pipe``."""

    S = 0
    V = 1
    M = 2
    MTE1 = 3
    MTE2 = 4
    MTE3 = 5
    FIX = 6


class Role(IntEnum):
    """The kinds of cores, ``sim::Role``: the cube part of the compute kernel, the comm kernel, or
    the vector part of the compute kernel."""

    CUBE = 0
    COMM = 1
    VECTOR = 2

    @property
    def unit(self) -> str:
        """The chip's name of such a core."""
        return "AIC" if self == Role.CUBE else "AIV"

    @property
    def kernel(self) -> str:
        """The kernel that such a core runs, ``comm`` or ``compute``."""
        return "comm" if self == Role.COMM else "compute"


NO_CHUNK = 0xFFFFFFFF

RECORD = np.dtype(
    [
        ("kind", "u1"),
        ("pipe", "u1"),
        ("other", "u1"),
        ("event", "u1"),
        ("chunk", "<u4"),
        ("signal", "<u4"),
        ("peer", "<u4"),
        ("amount", "<u8"),
        ("value", "<u4"),
        ("width", "<u4"),
    ]
)
"""The layout of ``sim::Record``."""

Records = npt.NDArray[np.void]
Core = tuple[Role, Records]

_HEADER = struct.Struct("<6I")
_CORE = struct.Struct("<IIQ")
_MAGIC = 0x32546B6D


def instruction(
    kind: Kind,
    pipe: Pipe = Pipe.S,
    *,
    chunk: int = NO_CHUNK,
    signal: int = 0,
    peer: int = 0,
    amount: int = 0,
    width: int = 0,
) -> Records:
    """Return one record; ``amount``, ``width`` and, for loads and puts, ``signal`` are as in
    ``sim::Record``."""
    return np.array([(kind, pipe, 0, 0, chunk, signal, peer, amount, 0, width)], dtype=RECORD)


def set_flag(source: Pipe, waiting: Pipe, event: int = 0) -> Records:
    """Return a record that lets ``waiting`` pass the matching :func:`wait_flag` once ``source`` has
    reached it."""
    return np.array([(Kind.SET_FLAG, source, waiting, event, NO_CHUNK, *[0] * 5)], dtype=RECORD)


def wait_flag(source: Pipe, waiting: Pipe, event: int = 0) -> Records:
    """Return a record that holds ``waiting`` until the matching :func:`set_flag`."""
    return np.array([(Kind.WAIT_FLAG, source, waiting, event, NO_CHUNK, *[0] * 5)], dtype=RECORD)


def blob(rank: int, world: int, cores: Sequence[Core]) -> bytes:
    """Return a rank's trace on node 0. Cores of a kind are numbered in the order given."""
    parts = [_HEADER.pack(_MAGIC, rank, world, 0, len(cores), 0)]
    numbers = dict.fromkeys(Role, 0)
    for kind, records in cores:
        parts += [_CORE.pack(kind, numbers[kind], len(records)), records.tobytes()]
        numbers[kind] += 1
    return b"".join(parts)


def cores(trace: bytes | bytearray) -> list[Core]:
    """Return the cores of a rank's trace, in the order in which it holds them; records are views of
    its memory."""
    *_, count, _ = _HEADER.unpack_from(trace)
    at, found = _HEADER.size, []
    for _ in range(count):
        role, _, length = _CORE.unpack_from(trace, at)
        at += _CORE.size
        found.append((Role(role), np.frombuffer(trace, RECORD, length, at)))
        at += length * RECORD.itemsize
    return found


def communication(traces: Sequence[bytes]) -> list[bytes]:
    """Return the traces of all ranks of a call without their compute kernels.

    Signals that only a compute kernel would raise count as raised, so waits for them are left out;
    waits for signals between comm kernels are kept.
    """
    kept = []
    raised: dict[tuple[int, int], int] = {}
    for trace in traces:
        own = [(role, records) for role, records in cores(trace) if role == Role.COMM]
        kept.append(own)
        for _, records in own:
            for kind, amount in ((Kind.TNOTIFY, "amount"), (Kind.NIC_PUT, "value")):
                for each in records[records["kind"] == kind]:
                    word = int(each["peer"]), int(each["signal"])
                    raised[word] = raised.get(word, 0) + int(each[amount])
    made = []
    for trace, own in zip(traces, kept, strict=True):
        magic, rank, world, node, _, _ = _HEADER.unpack_from(trace)
        parts = [_HEADER.pack(magic, rank, world, node, len(own), 0)]
        for number, (role, records) in enumerate(own):
            waits = np.flatnonzero(records["kind"] == Kind.TWAIT)
            never = [
                at
                for at in waits
                if raised.get((rank, int(records["signal"][at])), 0) < records["amount"][at]
            ]
            left = np.delete(records, never)
            parts += [_CORE.pack(role, number, len(left)), left.tobytes()]
        made.append(b"".join(parts))
    return made
