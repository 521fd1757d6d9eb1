"""The accelerator class of streams: the reference that others are compared with, and the planner's
fallback."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_args

from mkernel.backends.accelerators.streams import schedule as schedules
from mkernel.backends.accelerators.streams.device import (
    DEVICES,
    FILE,
    Device,
    scaled_mm,
    torch_device,
)
from mkernel.backends.accelerators.streams.schedule import StreamsCapabilities
from mkernel.backends.accelerators.streams.settings import StreamsSettings
from mkernel.backends.contracts.accelerator import AcceleratorBackend, Call
from mkernel.backends.contracts.instrumented import Instrumented
from mkernel.backends.contracts.memory import SymmetricMemory, Workspace
from mkernel.backends.contracts.status import Status
from mkernel.backends.runtime.host_memory import HostMemory
from mkernel.errors import Unsupported
from mkernel.plan.invariance import Invariant
from mkernel.plan.model import Activation, AttentionShape, DtypeName, LaunchPlan, ScaleMode
from mkernel.plan.request import Scheduled, ScheduleRequest
from mkernel.settings import load_as
from mkernel.topology.cost import MachineConstants
from mkernel.topology.model import Accelerator, Topology

if TYPE_CHECKING:
    import torch

    from mkernel.backends.accelerators.streams.call_streams import AbortWord
    from mkernel.backends.accelerators.streams.window import Windows
    from mkernel.backends.accelerators.streams.worker import Op, StreamsLaunch, Worker

_OPS = {
    "all_gather_gemm": "all_gather_gemm:run",
    "gemm_reduce_scatter": "gemm_reduce:scatter",
    "gemm_all_reduce": "gemm_reduce:all_reduce",
    "all_reduce": "all_reduce:run",
    "moe_dispatch": "moe:dispatch_rows",
    "moe_dispatch_gemm": "moe:dispatch",
    "moe_combine": "moe:combine",
    "moe_gemm_combine": "moe:gemm_combine",
    "moe_dispatch_backward": "moe_backward:dispatch",
    "moe_combine_backward": "moe_backward:combine",
    "moe_gemm_combine_backward": "moe_backward:gemm_combine",
    "ring_attention": "ring_attention:run",
    "ring_attention_backward": "ring_attention_backward:run",
}
"""The function of each op: ``module:function`` in this package."""
PUT_OPS = (*schedules.GEMMS, "all_reduce")
"""Ops whose messages can be puts. MoE's cannot, because they vary in size; attention's cannot,
because it passes on what it receives."""


def _op(name: str) -> Op:
    if name not in _OPS:
        raise Unsupported(f"accelerator 'streams' does not run {name}")
    module, _, function = _OPS[name].partition(":")
    return cast("Op", getattr(import_module(f"{__package__}.{module}"), function))


class StreamsAccelerator(AcceleratorBackend, Instrumented):
    """The backend of torch ops and torch.distributed on a CPU, on CUDA devices or on NPUs
    (torch_npu).

    On CUDA devices a call returns when it is queued, and it is queued when the previous call has
    ended. If the devices reach each other's memory, copy engines replace torch.distributed for the
    GEMM ops (setting ``streams_copies``; it needs the native module of ``backends/accelerators/cuda``).

    Each rank uses the device that its tensors lie on. If a process has used no device when it makes
    a world, the device on which the topology places it becomes its current one.
    """

    name: ClassVar[str] = "streams"
    settings = StreamsSettings
    machine_file: ClassVar[Path | None] = FILE
    visibility: ClassVar[Mapping[str, str]] = {
        "cuda": "CUDA_VISIBLE_DEVICES",
        "ascend": "ASCEND_RT_VISIBLE_DEVICES",
    }
    preference: ClassVar[int] = 10

    def __init__(self, device: str | None = None) -> None:
        """Make the backend for ``device``: ``cpu``, ``cuda`` or ``npu``; default: the setting
        ``streams_device``."""
        self._device = Device(device or load_as(StreamsSettings).device)
        self.device = self._device.name
        self.collectives = self._device.collectives
        self._capabilities = _capabilities(self._device, copies=self._device.copies)
        self._left: list[Windows] = []  # windows of worlds whose calls did not end
        self._windows: Windows | None = None  # of the open world, if it has any
        self._abort: AbortWord | None = None  # of the open world, once it has called

    def status(self) -> Status:
        """Return a usable status wherever torch.distributed and the device are available."""
        missing = self._device.missing()
        if missing is not None:
            return Status(
                False, f"{missing} (device {self.device!r})", "set MKERNEL_STREAMS_DEVICE=cpu"
            )
        copies = "; GEMM ops in a node: copy engines" if self._device.copies else ""
        return Status(
            True, f"torch on {self.device!r}, {self._capabilities.carrier} between ranks{copies}"
        )

    def probe(self) -> tuple[Accelerator, ...]:
        """Return the devices of that kind; on a CPU one prototype."""
        return self._device.probe()

    def capabilities(self) -> StreamsCapabilities:
        """Return the capabilities: all ops, any sizes."""
        return self._capabilities

    def capabilities_on(self, device: Accelerator) -> StreamsCapabilities:
        """Return the capabilities of torch's devices of that kind, on a machine whose driver works;
        those of this device if torch has no such kind."""
        name = DEVICES.get(device.kind)
        if name is None:
            return self._capabilities
        found = Device(name)
        copies = device.kind == "cuda" and found.copies_with_a_driver
        return _capabilities(found, copies=copies)

    def cards_of(self, topology: Topology) -> tuple[MachineConstants, ...]:
        """Return the constants of CUDA devices of which only figures are known."""
        return torch_device("cuda").cards_of(topology)

    @classmethod
    def schedule(cls, request: ScheduleRequest) -> Scheduled:
        """Choose messages or puts, their chunks and order, and the products beside them."""
        return schedules.schedule(request)

    def group_options(self, timeout: timedelta) -> Any:
        """Return options that give messages priority over products, if the device has priorities."""
        return self._device.group_options(timeout)

    def open(self, device: Accelerator) -> None:
        """Choose the process's device, unless the process has chosen one."""
        self._device.choose(device.index)
        self._windows = _windows(self._device)

    def on(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[Any]:
        """Return a context of the tensors' device, if symmetric memory lies on a device."""
        return nullcontext() if self._windows is None else self._windows.on(tensors)

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Allocate zeroed memory of the current device if peers can map it; otherwise shared host
        pages."""
        if self._windows is None:
            return HostMemory.create(nbytes)
        return self._windows.allocate(nbytes)

    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map a same-node peer's memory. OSError if it is gone, or devices cannot reach it."""
        if self._windows is None:
            return HostMemory.attach(descriptor)
        return self._windows.attach(descriptor)

    def workspace(self, plan: LaunchPlan) -> Workspace:
        """Return a window if messages are puts; otherwise nothing, because torch's allocator serves
        the calls."""
        how = schedules.check(plan, self._device.name)
        if plan.invariant is not None:
            self._check_invariant(plan, plan.invariant)
        if how.window_bytes == 0:
            return Workspace()
        if self._windows is None:
            raise Unsupported(
                f"the plan puts rows into windows of {how.window_bytes} bytes, and this rank has none; "
                "set MKERNEL_STREAMS_COPIES alike on all ranks, or build mkernel's CUDA module here"
            )
        return self._windows.workspace(plan)

    def _check_invariant(self, plan: LaunchPlan, invariant: Invariant) -> None:
        """Raise Unsupported unless what torch computes keeps the promise: products of a plan's
        segments, or attention."""
        import torch

        from mkernel.backends.accelerators.streams import invariant_attention
        from mkernel.backends.contracts.invariant_product import check_products

        device = torch.empty(0, device=self.device).device  # with its index
        if isinstance(plan.shape, AttentionShape):
            invariant_attention.check(device, plan.shape.head_dim)
        for k in schedules.depths(plan, invariant):
            check_products(device, k)

    def routing_words(self, world: int, tokens: int, top_k: int, experts: int) -> int:
        """Return the number of words of the ids of all ranks' tokens, plus one for the number of
        rows."""
        from mkernel.backends.accelerators.streams.moe import routing_words  # needs torch

        return routing_words(world, tokens, top_k)

    def dispatched_rows(self, routing: torch.Tensor) -> int | None:
        """Return the number of rows, also of a routing on a device if the tensor is no copy."""
        from mkernel.backends.accelerators.streams.routing import known  # needs torch

        found = known(routing)
        return super().dispatched_rows(routing) if found is None else found.height

    def launch(self, call: Call) -> StreamsLaunch:
        """Pass the call to the worker's thread. On a device with queues return once it is queued,
        otherwise at once."""
        words = None if self._windows is None else self._windows.words(call)
        if self._abort is None:
            from mkernel.backends.accelerators.streams.call_streams import AbortWord  # native code

            self._abort = AbortWord(call.pad)
        launch = self._worker.start(call, _op(call.plan.op), self._device, words, self._abort)
        if self._device.queues:
            launch.until_queued()
        return launch

    def close(self, timeout_s: float) -> bool:
        """Wait for a call that is only queued: its thread reads the world's memory."""
        windows, self._windows = self._windows, None
        idle = not self._device.queues or self._worker.idle(timeout_s)
        self._worker.stop()
        if self._abort is not None:  # a thread that is stuck goes on
            self._abort.let_go()
            self._abort = None
        if windows is not None and idle:
            windows.close()
        elif windows is not None:
            self._left.append(windows)
        return idle

    @cached_property
    def _worker(self) -> Worker:
        from mkernel.backends.accelerators.streams.worker import Worker  # needs torch

        return Worker()


def _windows(device: Device) -> Windows | None:
    if not device.copies:
        return None
    from mkernel.backends.accelerators.streams.window import Windows  # needs torch

    return Windows(device)


def _capabilities(device: Device, *, copies: bool) -> StreamsCapabilities:
    dtypes: tuple[DtypeName, ...] = ("float32", "bfloat16", "float16")
    if device.name != "npu":  # whose matrix units have no such numbers
        dtypes = (*dtypes, "float64")
    return StreamsCapabilities(
        torch_device=device.name,
        ops=tuple(_OPS),
        dtypes=dtypes,
        out_dtypes=dtypes,
        b_layouts=("row", "column"),
        pitched=("b",),
        adds_norm=True,
        scale_modes=get_args(ScaleMode) if device.name == "cpu" else (),
        scaled_mm=scaled_mm(device.name),
        scaled_experts=device.name == "cpu",
        activations=get_args(Activation),
        attention_layouts=("heads", "positions"),
        documents=("ring_attention", "ring_attention_backward"),
        alignment_bytes=1,
        transfer_paths=("torch.distributed", "p2p") if copies else ("torch.distributed",),
        peer_access=copies,
        compute_cores=device.cores,
        comm_cores=1,
        stream_ordered=device.queues,
        invariant_ops=schedules.INVARIANT,
        invariant_documents=True,
        kinds=tuple(DEVICES),
        process_group=True,
        put_ops=PUT_OPS if copies else (),
        hierarchical_ops=schedules.HIERARCHICAL_OPS,
        routing_of_ids=True,
        reuses_routing="always",
        carrier=f"torch.distributed ({device.collectives})",
        constants=device.constants,
        cards=device.cards,
    )
