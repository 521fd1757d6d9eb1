"""Backends whose calls are only queued when the op returns, on host memory: what a GPU does to a world,
where there is none."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, ClassVar

from mkernel.backends.accelerators.streams import StreamsAccelerator
from mkernel.backends.accelerators.streams.worker import StreamsLaunch
from mkernel.backends.contracts.accelerator import Call, Launch
from mkernel.backends.contracts.memory import SymmetricMemory, Workspace
from mkernel.backends.transport import _transport
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan
from mkernel.topology.model import Accelerator

FORMAT = b"formatted"


class Queueing(StreamsAccelerator):
    """``streams``, stream-ordered: a thread runs the calls in order. Remembers what the world did."""

    name: ClassVar[str] = "queueing"

    def __init__(self) -> None:
        super().__init__("cpu")
        self.events: list[str] = []
        self.calls: list[Call] = []
        self.aborted: list[_transport.AbortCode] = []
        self._record = ctypes.create_string_buffer(_transport.RECORD_BYTES)
        self.ends_in_time = True

    def capabilities(self) -> AcceleratorCapabilities:
        return super().capabilities().model_copy(update={"stream_ordered": True})

    def open(self, device: Accelerator) -> None:
        self.events.append(f"open {device.id}")
        self._record[:] = bytes(_transport.RECORD_BYTES)
        self.aborted, self.calls = [], []

    def close(self, timeout_s: float) -> bool:
        self.events.append("close")
        return self.ends_in_time

    def format(self, memory: SymmetricMemory) -> None:
        self.events.append(f"format {memory.nbytes}")

    def workspace(self, plan: LaunchPlan) -> Workspace:
        return Workspace((1000 * plan.gemm.m,), signals=1)

    def launch(self, call: Call) -> StreamsLaunch:
        self.calls.append(call)
        return super().launch(call)

    def abort(self, code: _transport.AbortCode) -> None:
        self.aborted.append(code)

    def record(self) -> int:
        return ctypes.addressof(self._record)


class Wordy(Queueing):
    """Plans need more signals than a pad can have."""

    def workspace(self, plan: LaunchPlan) -> Workspace:
        return Workspace((8,), signals=_transport.MOST_SIGNALS + 1)


class Broken(Queueing):
    """The second call raises when it is waited for."""

    def launch(self, call: Call) -> Any:
        inner = super().launch(call)
        return Raising(inner) if call.number == 2 else inner


class Raising(Launch):
    """A launch whose device fails."""

    def __init__(self, inner: Launch) -> None:
        self._inner = inner

    def wait(self, timeout_s: float) -> bool:
        if self._inner.wait(timeout_s):
            raise RuntimeError("the device fell over")
        return False

    def results(self) -> Mapping[str, Any]:
        return {}
