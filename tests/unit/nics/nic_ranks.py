"""Ranks of one process for NIC tests: memory, a signal pad and a session each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mkernel.backends.contracts.nic import NicBackend, NicSession
from mkernel.backends.nics.cx7 import Cx7Nic
from mkernel.backends.transport import _transport
from mkernel.harness.nic_ranks import SIGNALS, Port
from mkernel.settings import NicSettings
from mkernel.topology.lanes import RankLanes, nic_schedule
from mkernel.topology.model import Nic

DEADLINE_S = 240.0


def settings(**values: Any) -> NicSettings:
    """NicSettings with some values changed."""
    return NicSettings.model_validate(values)


def lanes(backend: NicBackend, rank: int, device: str = "soft0", **values: Any) -> RankLanes:
    """A rank's part of a plan by which every peer is reached from all these devices, ``name`` or
    ``name:port``, joined by commas. ``values``: of the settings."""
    names = [each.partition(":") for each in device.split(",")]
    ports = tuple(
        Nic(id=f"{name}:{port}" if port else name, kind="soft", name=name, port=int(port or 1))
        for name, _, port in names
    )
    schedule = nic_schedule(backend.use(settings(**values)), several_rails=len(ports) > 1)
    return RankLanes.between_equals(rank, ports, schedule)


def opened(
    backend: NicBackend, rank: int = 0, device: str = "soft0", verbs: str = "soft", **values: Any
) -> NicSession:
    """A session on such lanes."""
    return backend.open(verbs, lanes(backend, rank, device, **values), settings(**values))


class Rank(Port):
    """One rank: open, then ``join`` the others, then put."""

    def __init__(
        self,
        rank: int,
        nbytes: int = 1 << 20,
        backend: NicBackend | None = None,
        device: str = "soft0",
        **values: Any,
    ) -> None:
        session = opened(backend or Cx7Nic(), rank, device, **values)
        super().__init__(rank, session, nbytes, DEADLINE_S)

    def waits(self, signal: int, value: int) -> bool:
        """Whether a signal's counter comes to ``value`` in time."""
        result = _transport.pad_wait(self.pad, signal, value, self.timeout_s)
        return result == _transport.WaitResult.ok

    def wait_abort(self) -> _transport.AbortCode:
        """Waits for the pad's abort word through a wait that nobody satisfies."""
        self.waits(SIGNALS - 1, 1 << 60)
        return _transport.record_outcome(_transport.pad_record(self.pad))[0]

    def fill(self, nbytes: int, offset: int = 0) -> bytes:
        """Fresh random bytes at ``offset``; returns them."""
        data = os.urandom(nbytes)
        self.memory.bytes[offset : offset + nbytes] = bytearray(data)
        return data

    def read(self, nbytes: int, offset: int = 0) -> bytes:
        return bytes(self.memory.bytes[offset : offset + nbytes])

    def close(self) -> None:
        self.session.close()


def join(ranks: list[Rank], change_key: Callable[[str], str]) -> None:
    """Connect ranks of this process all to all; ``change_key`` may spoil rank 1's key at rank 0."""
    pairs = [(a, b) for a in ranks for b in ranks if a is not b]
    addresses = {(a.rank, b.rank): a.session.address(b.rank) for a, b in pairs}
    for a, b in pairs:
        a.session.connect(b.rank, addresses[b.rank, a.rank])
    for each in ranks:
        each.session.start(each.pad, ())
    keys = {r.rank: r.session.register(0, r.memory.address, r.memory.nbytes) for r in ranks}
    for a, b in pairs:
        key = keys[b.rank]
        a.session.bind(0, b.rank, change_key(key) if (a.rank, b.rank) == (0, 1) else key)


@contextmanager
def local_ranks(
    change_key: Callable[[str], str] = lambda key: key, **values: Any
) -> Iterator[list[Rank]]:
    """Two joined ranks of this process; ``change_key`` as for :func:`join`."""
    ranks = [Rank(i, **values) for i in range(2)]
    try:
        join(ranks, change_key)
        yield ranks
    finally:
        for each in ranks:
            each.close()
