"""Faults of signals that are memory writes of their own, behind the data, and polled there.

On one queue pair that keeps order this works: :class:`FlagBehindData` is no fault. It goes wrong where
nothing keeps the flag behind its data. There the device holds one write in four back for up to
:data:`HOLD_NS`, long for a receiver that polls. Of the 11,520 puts of a quick `visibility` 3 in 16
have their data held and their flag not: a receiver that looks in time at one in a hundred of those
misses all with a probability below 1e-9.
"""

from __future__ import annotations

import json
import os
import threading
from typing import ClassVar

import numpy as np

from mkernel.backends.contracts.nic import NO_SIGNAL, NicSession
from mkernel.backends.nics.efa import EfaNic
from mkernel.backends.nics.session import MAX_REGIONS
from mkernel.backends.nics.verbs_backend import VerbsBackend
from mkernel.backends.runtime import _runtime
from mkernel.conformance.nic_faults.base import Fault, Session
from mkernel.harness.nic_ranks import SIGNALS, Memory
from mkernel.settings import NicSettings

_REGION = MAX_REGIONS - 1
_RANKS = 8
_OUTGOING = 1 << 16
"""Flags under way at most: each is sent from a word of its own."""
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

    def put(
        self, peer: int, region: int, local: int, remote: int, nbytes: int, signal: int, value: int
    ) -> None:
        if nbytes:
            self.inner.put(peer, region, local, remote, nbytes, NO_SIGNAL, 0)
        if signal == NO_SIGNAL:
            return
        with self.lock:
            slot = next(self.number) % _OUTGOING
            total = self.sums[peer, signal] = self.sums.get((peer, signal), 0) + value
            self.outgoing[slot] = total
            here = 8 * (_RANKS * SIGNALS + slot)
            there = 8 * (self.rank * SIGNALS + signal)
            self.inner.put(peer, _REGION, here, there, 8, NO_SIGNAL, 0)

    def _run(self, pad: int) -> None:
        seen = np.zeros_like(self.incoming)
        while not self.stop.is_set():
            now = np.maximum(self.incoming, seen)  # an older flag may come after a newer one
            for index in np.flatnonzero(now != seen):
                added = int(now[index] - seen[index])
                _runtime.pad_add(pad, int(index) % SIGNALS, added)
            seen = now
            os.sched_yield()

    def close(self) -> None:
        self.stop.set()
        if self.thread is not None:
            self.thread.join()
        self.inner.close()


class FlagBehindData(Fault):
    """Nothing: on one RC queue pair, in strictly ordered memory, a flag may be a write behind its
    data."""

    session = Flags

    def open(self, device: str, verbs: str, rank: int, settings: NicSettings) -> NicSession:
        return super().open(device, verbs, rank, settings.model_copy(update={"qps": 1}))


class RelaxedFlag(FlagBehindData):
    """The flag is a write behind its data, to memory with relaxed ordering."""

    def open(self, device: str, verbs: str, rank: int, settings: NicSettings) -> NicSession:
        # Relaxed whatever a registration says, as cards can be set up to be.
        os.environ["MKERNEL_SOFTVERBS_RELAXED_ORDERING"] = "1"
        os.environ["MKERNEL_SOFTVERBS_HOLD_NS"] = str(HOLD_NS)
        return super().open(device, verbs, rank, settings)


class SeparateFlag(Fault):
    """The flag is an SRD write of its own."""

    around: ClassVar[type[VerbsBackend]] = EfaNic
    session = Flags

    def open(self, device: str, verbs: str, rank: int, settings: NicSettings) -> NicSession:
        os.environ["MKERNEL_SOFTVERBS_HOLD_NS"] = str(HOLD_NS)
        os.environ["MKERNEL_SOFTVERBS_DUPLICATES"] = (
            "0"  # whose second placement is held far longer
        )
        return super().open(device, verbs, rank, settings)
