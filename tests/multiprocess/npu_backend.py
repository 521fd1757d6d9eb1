"""The ``streams`` backend on NPUs, with a stand-in for torch_npu that works on host memory.

:func:`install` puts it where torch_npu registers itself: ``torch.npu``, and the process group backend
``hccl``. Streams run nothing by themselves; they, events and limits leave a record.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import distributed

from mkernel.backends.accelerators.streams import StreamsAccelerator
from mkernel.backends.accelerators.streams.schedule import GatherSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.request import Scheduled, ScheduleRequest
from mkernel.topology.model import Accelerator

CUBES, VECTORS = 24, 48
ALL = (CUBES, VECTORS)


class Stream:
    """``limit``: cores that what is put on it may use."""

    def __init__(self, device: Any = None) -> None:
        self.limit = ALL

    def wait_stream(self, other: Stream) -> None:
        _Record.of.append(("wait", self, other))

    def wait_event(self, event: Event) -> None:
        _Record.of.append(("wait", self, event.stream))


class Event:
    stream: Stream

    def __init__(self, enable_timing: bool = False) -> None:
        self.times = enable_timing

    def record(self, stream: Stream) -> None:
        self.stream, self.at = stream, time.perf_counter()
        _Record.of.append(("event", stream, stream.limit))

    def query(self) -> bool:
        return Npu.idle.is_set()

    def elapsed_time(self, end: Event) -> float:
        assert self.times
        assert end.times
        return 1e3 * (end.at - self.at)


class _Record:
    """What happened, in order: (what, stream, more)."""

    of: ClassVar[list[tuple[str, Any, Any]]] = []
    groups: ClassVar[list[int]] = []
    """Sizes of the ``hccl`` groups that were made."""


class Npu(ModuleType):
    """``torch.npu``."""

    Stream, Event = Stream, Event
    default = Stream()
    chosen: int | None = None
    idle = threading.Event()
    """Whether the device has done all that was put on its streams."""
    idle.set()

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 8

    def is_initialized(self) -> bool:
        return self.chosen is not None

    def set_device(self, index: int) -> None:
        Npu.chosen = index

    def get_device_name(self, index: int) -> str:
        return f"stand-in {index}"

    def current_stream(self, device: Any) -> Stream:
        return self.default

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        yield

    def get_device_limit(self, device: int) -> dict[str, int]:
        return {"cube_core_num": CUBES, "vector_core_num": VECTORS}

    def set_stream_limit(self, stream: Stream, cube_num: int = -1, vector_num: int = -1) -> None:
        stream.limit = (cube_num, vector_num)

    def reset_stream_limit(self, stream: Stream) -> None:
        stream.limit = ALL


def _hccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    _Record.groups.append(size)
    return distributed.ProcessGroupGloo(store, rank, size, timeout)


def install() -> None:
    """What ``import torch_npu`` does, on host memory."""
    sys.modules["torch_npu"] = module_from_spec(ModuleSpec("torch_npu", None))
    torch.npu = Npu("torch.npu")  # type: ignore[attr-defined]
    if not hasattr(distributed.Backend, "HCCL"):
        distributed.Backend.register_backend("hccl", _hccl, devices=["cpu"])


class OnNpu(StreamsAccelerator):
    """The backend as it is, but for the type of the tensors."""

    name: ClassVar[str] = "streams"

    def __init__(self) -> None:
        install()
        super().__init__("npu")
        self.device = "cpu"
        self.used: list[str] = []

    def open(self, device: Accelerator) -> None:
        assert device.kind == "ascend"
        super().open(device)
        assert Npu.chosen == device.index

    def launch(self, call: Call) -> Any:
        _Record.of.clear()
        assert call.group is not None
        self.used.append(distributed.get_backend(call.group))
        return super().launch(call)

    def told(self) -> tuple[list[str], list[int], list[tuple[str, bool, Any]]]:
        """Backends of the groups of all calls; sizes of the ``hccl`` groups; and of the last call
        (what, whether on the caller's stream, more)."""
        last = [
            (what, stream is Npu.default, more is Npu.default if what == "wait" else more)
            for what, stream, more in _Record.of
        ]
        return self.used, _Record.groups, last


class TwoNpus(OnNpu):
    """On a machine of two."""

    def probe(self) -> tuple[Accelerator, ...]:
        return super().probe()[:2]


class Queueing(OnNpu):
    """As on CUDA devices: calls are only queued when they return."""

    def __init__(self) -> None:
        super().__init__()
        self._device.queues = True

    def capabilities(self) -> AcceleratorCapabilities:
        return super().capabilities().model_copy(update={"stream_ordered": True})


class SideBySide(Queueing):
    """As on CUDA devices: two products at a time, on a stream each."""

    @classmethod
    def schedule(cls, request: ScheduleRequest) -> Scheduled:
        found = super().schedule(request)
        if not isinstance(found.schedule, GatherSchedule):
            return found
        whole = {"products_in_flight": 2, "rows_per_chunk": 12}  # of 24 on two ranks
        return found._replace(schedule=found.schedule.model_copy(update=whole))

    def order(self) -> list[tuple[str, str, str]]:
        """Of the last call: (``event``, stream, "") and (``wait``, who waits, for whom). The caller's
        stream is ``callers``, the first one that waited for it ``comm``, another one ``beside``."""
        names = {id(Npu.default): "callers"}
        for what, stream, _ in _Record.of:
            if what == "wait" and id(stream) not in names:
                names[id(stream)] = "beside" if "comm" in names.values() else "comm"
        return [
            (what, names[id(stream)], names[id(more)] if what == "wait" else "")
            for what, stream, more in _Record.of
        ]


class NotJoined(SideBySide):
    """A planted fault: what comes after a call does not wait for the second product's stream."""

    def launch(self, call: Call) -> Any:
        def wait_stream(stream: Stream, other: Stream) -> None:
            if stream is not Npu.default:
                _Record.of.append(("wait", stream, other))

        Stream.wait_stream = wait_stream  # type: ignore[method-assign]
        return super().launch(call)


class Unlimited(OnNpu):
    """A planted fault: nobody sets the limit."""

    def __init__(self) -> None:
        super().__init__()
        self._device.shared = lambda *_: nullcontext()  # type: ignore[method-assign]


class WrongGroup(OnNpu):
    """A planted fault: messages go through gloo."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = "gloo"
