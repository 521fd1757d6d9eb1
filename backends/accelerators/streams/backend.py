"""The streams backend: the reference that others are compared with, and the planner's fallback."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_args

from mkernel.backends.accelerators.streams.device import Device
from mkernel.backends.base import (
    AcceleratorBackend,
    AcceleratorCapabilities,
    Call,
    Status,
    SymmetricMemory,
    Workspace,
)
from mkernel.backends.runtime.host_memory import HostMemory
from mkernel.errors import Unsupported
from mkernel.plan.model import LaunchPlan
from mkernel.plan.order import Runs
from mkernel.settings import load
from mkernel.topology.model import Accelerator

if TYPE_CHECKING:
    from mkernel.backends.accelerators.streams.worker import Op, StreamsLaunch, Worker

_OPS = {
    "all_gather_gemm": "all_gather_gemm:run",
    "gemm_reduce_scatter": "gemm_reduce_scatter:run",
    "gemm_all_reduce": "gemm_all_reduce:run",
    "moe_dispatch_gemm": "moe:dispatch",
    "moe_combine": "moe:combine",
    "ring_attention": "ring_attention:run",
}
"""Where each op lies: ``module:function`` of this package."""


def _op(name: str) -> Op:
    if name not in _OPS:
        raise Unsupported(f"accelerator 'streams' does not run {name}")
    module, _, function = _OPS[name].partition(":")
    return cast("Op", getattr(import_module(f"{__package__}.{module}"), function))


class StreamsAccelerator(AcceleratorBackend):
    """torch ops and torch.distributed on a CPU, on CUDA devices or on NPUs (torch_npu).

    On CUDA devices a call returns when it is queued, and is queued when the one before it has ended.

    Each rank uses the device that its tensors lie on. A process that has used none when it makes a
    world gets the one that the topology places it on as its current device.
    """

    name: ClassVar[str] = "streams"

    def __init__(self, device: str | None = None) -> None:
        """``device``: ``cpu``, ``cuda`` or ``npu``; default: the setting ``streams_device``."""
        self._device = Device(device or load().streams_device)
        self.device = self._device.name
        self.collectives = self._device.collectives
        self._capabilities = _capabilities(self._device)

    def status(self) -> Status:
        """Usable wherever torch.distributed is and the device is there."""
        missing = self._device.missing()
        if missing is not None:
            return Status(
                False, f"{missing} (device {self.device!r})", "set MKERNEL_STREAMS_DEVICE=cpu"
            )
        return Status(True, f"torch on {self.device!r}, {self.collectives} between ranks")

    def probe(self) -> tuple[Accelerator, ...]:
        """The devices of that kind; on a CPU one prototype."""
        return self._device.probe()

    def capabilities(self) -> AcceleratorCapabilities:
        """All ops, any sizes. Chunks pay only where the device has streams."""
        return self._capabilities

    def group_options(self, timeout: timedelta) -> Any:
        """Messages go before products, where the device knows priorities."""
        return self._device.group_options(timeout)

    def open(self, device: Accelerator) -> None:
        """Choose the process's device, where it has not."""
        self._device.choose(device.index)

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Zeroed shared host pages; only the signal pad needs them."""
        return HostMemory.create(nbytes)

    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map a same-node peer's pages. OSError where they are gone."""
        return HostMemory.attach(descriptor)

    def workspace(self, plan: LaunchPlan) -> Workspace:
        """None: torch's allocator serves the calls."""
        return Workspace(nbytes=0, signals=0)

    def launch(self, call: Call) -> StreamsLaunch:
        """Hand the call to the worker's thread. On a device that queues return once it is queued, else
        at once."""
        launch = self._worker.start(call, _op(call.plan.op), self._device)
        if self._device.queues:
            launch.until_queued()
        return launch

    def close(self, timeout_s: float) -> bool:
        """Wait for a call that is only queued: its thread looks at the world's memory."""
        return not self._device.queues or self._worker.idle(timeout_s)

    @cached_property
    def _worker(self) -> Worker:
        from mkernel.backends.accelerators.streams.worker import Worker  # needs torch

        return Worker()


def _capabilities(device: Device) -> AcceleratorCapabilities:
    return AcceleratorCapabilities(
        ops=tuple(_OPS),
        dtypes=("float32", "bfloat16", "float16"),
        out_dtypes=("float32", "bfloat16", "float16"),
        b_layouts=("row", "column"),
        alignment_bytes=1,
        transfer_paths=("torch.distributed",),
        peer_access=False,
        compute_cores=device.cores,
        comm_cores=1,
        chunk_unit="rows",
        kernel_a_chunk=True,
        orders=get_args(Runs),
        overlaps=device.has_streams,
        row_chunks=device.row_chunks,
        stream_ordered=device.queues,
        chunk_invariant=False,  # a library may choose another kernel for fewer rows
        process_group=True,
        constants=device.constants,
    )
