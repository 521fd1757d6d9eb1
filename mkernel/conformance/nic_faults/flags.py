"""Signals that are memory writes of their own, behind the data, and polled there.

On one queue pair that keeps order this works: the row ``FlagBehindData`` breaks nothing. It goes wrong
where nothing keeps the flag behind its data. There the device holds one write in four back for up to
:data:`HOLD_NS`, long for a receiver that polls. Of the 11,520 puts of a quick `visibility` 3 in 16
have their data held and their flag not: a receiver that looks in time at one in a hundred of those
misses all with a probability below 1e-9.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable

import numpy as np

from mkernel.backends.contracts.nic import NO_SIGNAL, NicSession
from mkernel.backends.nics.session import MAX_REGIONS
from mkernel.backends.transport import _transport
from mkernel.conformance.nic_faults.wrappers import Put, Session
from mkernel.harness.nic_ranks import SIGNALS, Memory

_REGION = MAX_REGIONS - 1
_RANKS = 8
_OUTGOING = 1 << 16
"""The most flags under way: each is sent from a word of its own."""
HOLD_NS = 100_000_000


class Flags(Session):
    """A put is its data without a signal, then eight bytes: the sum of its signal's values.

    Region 1023 holds what peers write, ``[rank, signal]``, and behind it what is sent from here.
    """

    def __init__(self, inner: NicSession) -> None:
        super().__init__(inner)
        self.memory = Memory(8 * (_RANKS * SIGNALS + _OUTGOING))
        words = self.memory.bytes.view(np.uint64)
        self.incoming = words[: _RANKS * SIGNALS]
        self.outgoing = words[_RANKS * SIGNALS :]
        self.rank = 0
        self.key = ""
        self.sums: dict[tuple[int, int], int] = {}
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None

    def address(self, peer: int) -> str:
        if not self.key:
            self.key = self.inner.register(_REGION, self.memory.address, self.memory.nbytes)
        return json.dumps({"rank": peer, "address": self.inner.address(peer), "key": self.key})

    def connect(self, peer: int, address: str) -> None:
        told = json.loads(address)
        self.rank = told["rank"]
        self.inner.connect(peer, told["address"])
        self.inner.bind(_REGION, peer, told["key"])

    def start(self, pad: int, cpus: tuple[int, ...]) -> None:
        self.inner.start(pad, cpus)
        self.thread = threading.Thread(target=self._run, args=(pad,), daemon=True)
        self.thread.start()

    def change(self, put: Put) -> Iterable[Put]:
        if put.nbytes:
            yield put._replace(signal=NO_SIGNAL, value=0)
        if put.signal == NO_SIGNAL:
            return
        key = put.peer, put.signal
        with self.lock:
            slot = next(self.number) % _OUTGOING
            self.sums[key] = self.sums.get(key, 0) + put.value
            self.outgoing[slot] = self.sums[key]
            here = 8 * (_RANKS * SIGNALS + slot)
            there = 8 * (self.rank * SIGNALS + put.signal)
            yield Put(put.peer, _REGION, here, there, 8, NO_SIGNAL, 0)

    def _run(self, pad: int) -> None:
        seen = np.zeros_like(self.incoming)
        while not self.stop.is_set():
            now = np.maximum(self.incoming, seen)  # an older flag may come after a newer one
            for index in np.flatnonzero(now != seen):
                added = int(now[index] - seen[index])
                _transport.pad_add(pad, int(index) % SIGNALS, added)
            seen = now
            os.sched_yield()

    def close(self) -> None:
        self.stop.set()
        if self.thread is not None:
            self.thread.join()
        self.inner.close()
