"""One rank's windows in a world: the memory that peers map, the plans that use it, and their words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from mkernel.backends.accelerators.streams.device import Device
from mkernel.backends.accelerators.streams.schedule import StreamsSchedule
from mkernel.backends.accelerators.streams.window import Words, words_of
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import SymmetricMemory, Workspace
from mkernel.backends.cuda.memory import DeviceMemory
from mkernel.backends.cuda.native import native
from mkernel.errors import ArgumentError
from mkernel.plan.model import LaunchPlan


class Windows:
    """One rank's windows; they live as long as the world. A rank uses one device, that of its first
    call."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._index: int | None = None  # of the device that the memory lies on
        self._words: Words | None = None

    def on(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Return a context of the tensors' device. ArgumentError if it differs from the memory's."""
        for name, tensor in tensors.items():
            if self._index not in (None, tensor.get_device()):
                raise ArgumentError(
                    f"{name}.device",
                    tensor.device,
                    f"cuda:{self._index}, where what peers write to lies in this world",
                )
        return self._device.at(next(iter(tensors.values())).device)

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Allocate zeroed memory of the current device. OSError if it has none that peers can map."""
        self._index = self._device.index()
        with _advice():
            return DeviceMemory.create(nbytes, self._index)

    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map a same-node peer's memory. OSError if it is gone, or the device cannot reach it."""
        if self._index is None:
            raise OSError("a peer's memory is mapped for the device of own memory; there is none")
        with _advice():
            return DeviceMemory.attach(descriptor, self._index)

    def workspace(self, plan: LaunchPlan) -> Workspace:
        """Return the memory and signals that a plan needs whose messages are puts."""
        nbytes = plan.part(StreamsSchedule).window_bytes
        return Workspace((nbytes,), signals=words_of(plan.world_size))

    def words(self, call: Call) -> Words | None:
        """Return the words of a call whose workspace is a window; None if it is not. OSError if the
        device cannot address the pads."""
        if not call.plan.part(StreamsSchedule).window_bytes:
            return None
        if self._words is None:
            with _advice():
                self._words = Words(call)
        return self._words

    def close(self) -> None:
        """Release the words as the world ends; none of its calls runs any more."""
        if self._words is not None:
            self._words.close()


@contextmanager
def _advice() -> Iterator[None]:
    try:
        yield
    except (OSError, native().CudaError) as error:
        raise OSError(
            f"{error}; MKERNEL_STREAMS_COPIES=0 on all ranks does without such memory"
        ) from error
