"""The ascend backend: each op as a comm and a compute kernel on simulated NPU cores."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from mkernel.backends.accelerators.ascend.gathered import unpack_gathered
from mkernel.backends.accelerators.ascend.memory import HostMemory
from mkernel.backends.base import (
    AcceleratorBackend,
    AcceleratorCapabilities,
    Call,
    Launch,
    LaunchTimes,
    ModelledRun,
    Status,
    SymmetricMemory,
    View,
    Workspace,
)
from mkernel.errors import BackendUnavailable, DtypeError, LayoutError, ShapeError, Unsupported
from mkernel.plan.model import LaunchPlan
from mkernel.settings import load
from mkernel.topology.model import Accelerator

if TYPE_CHECKING:
    from mkernel.backends.accelerators.ascend import _ascend

COMPUTE_CORES = 24
"""Cube cores (AIC) of the simulated chip."""
COMM_CORES = 48
"""Vector cores (AIV) of the simulated chip."""

_TORCH_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


def _native() -> Any:
    try:
        from mkernel.backends.accelerators.ascend import _ascend
    except ImportError as error:
        raise BackendUnavailable(
            f"the ascend simulator's native module does not import: {error}; reinstall mkernel"
        ) from error
    return _ascend


_REDUCING = ("gemm_reduce_scatter", "gemm_all_reduce")


def _geometry(plan: LaunchPlan) -> _ascend.AgGemmGeometry | _ascend.GemmReduceGeometry:
    if plan.op not in ("all_gather_gemm", *_REDUCING):
        raise Unsupported(f"accelerator 'ascend' does not run {plan.op}")
    shape, chunking, world = plan.gemm, plan.chunking, plan.world_size
    if chunking is None:
        raise Unsupported("accelerator 'ascend' runs plans that are cut in tiles; this one is not")
    native = _native()
    cut = chunking.model_dump(exclude={"chunks_per_rank"})
    geometry: _ascend.AgGemmGeometry | _ascend.GemmReduceGeometry
    if plan.op == "all_gather_gemm":
        geometry = native.AgGemmGeometry(
            world=world,
            m_local=shape.m // world,
            n=shape.n,
            k=shape.k,
            dtype=plan.dtype,
            **cut,
        )
    else:
        geometry = native.GemmReduceGeometry(
            world=world,
            m=shape.m,
            n=shape.n,
            k=shape.k,
            dtype=plan.dtype,
            out_dtype=plan.out_dtype,
            replicated=plan.op == "gemm_all_reduce",
            **cut,
        )
    if geometry.chunks != chunking.chunks_per_rank:
        raise ValueError(
            f"plan.chunking.chunks_per_rank = {chunking.chunks_per_rank}, but {chunking} cuts "
            f"{shape} of {plan.op} on {world} ranks into {geometry.chunks} chunks a rank"
        )
    return geometry


class _Shapes(NamedTuple):
    """Rows and columns of a call's tensors on one rank."""

    a: tuple[int, int]
    b: tuple[int, int]
    out: tuple[int, int]


def _shapes(plan: LaunchPlan) -> _Shapes:
    shape, world = plan.gemm, plan.world_size
    part = shape.m // world
    rows_of_a = part if plan.op == "all_gather_gemm" else shape.m
    rows_of_out = part if plan.op == "gemm_reduce_scatter" else shape.m
    return _Shapes((rows_of_a, shape.k), (shape.k, shape.n), (rows_of_out, shape.n))


def _order(plan: LaunchPlan, rank: int) -> list[int]:
    """Whose rows to consume, or for whom to compute, the rank itself first."""
    return list(plan.order.consumers(rank) if plan.op in _REDUCING else plan.order[rank])


def _matrix(
    call: Call, name: str, shape: tuple[int, int], dtype: str, *, column_major: bool = False
) -> tuple[int, int, int]:
    """(address, row stride, column stride) of an argument that fits the plan, else an error."""
    tensor = call.tensors[name]
    if tensor.dtype != _TORCH_DTYPES[dtype]:
        raise DtypeError(name, tensor.dtype, f"{dtype}, as planned")
    if tuple(tensor.shape) != shape:
        raise ShapeError(name, tuple(tensor.shape), f"{shape}, as planned")
    if tensor.device.type != "cpu":
        raise LayoutError(name, tensor.device, "a tensor in host memory: the device is simulated")
    row, col = tensor.stride()
    # torch leaves the strides of dimensions of size 1 open.
    if column_major:
        row, lead = 1, (col if shape[1] > 1 else shape[0])
        legal = shape[0] == 1 or tensor.stride(0) == 1
    else:
        col, lead = 1, (row if shape[0] > 1 else shape[1])
        legal = shape[1] == 1 or tensor.stride(1) == 1
    shortest = shape[0] if column_major else shape[1]
    if not legal or lead < shortest:
        wanted = "columns" if column_major else "rows"
        raise LayoutError(name, f"strides {tensor.stride()}", f"contiguous {wanted}, as planned")
    return (tensor.data_ptr(), 1, lead) if column_major else (tensor.data_ptr(), lead, 1)


_in_flight: set[AscendLaunch] = set()
"""Launches whose kernels may still run. They stay here, and so keep their tensors, even if the
caller drops them."""


class AscendLaunch(Launch):
    """A call that runs on simulated cores."""

    def __init__(
        self, native: _ascend.Launch, call: Call, after: Callable[[], None] | None = None
    ) -> None:
        """Called by ``AscendAccelerator.launch``. ``after`` runs once, when both kernels ended."""
        self._native = native
        self._after = after
        self._tensors = tuple(call.tensors.values())
        self._traced = call.trace
        for other in tuple(_in_flight):
            other._finished(0.0)
        _in_flight.add(self)

    def _finished(self, timeout_s: float) -> bool:
        done = True
        # What went wrong is for the owner to hear, in its own `wait`.
        with contextlib.suppress(RuntimeError):
            done = self._native.wait(timeout_s)
        if done:
            _in_flight.discard(self)
        return done

    def wait(self, timeout_s: float) -> bool:
        """True once both kernels have returned. RuntimeError where the simulator refused an
        instruction (names core, instruction and buffer range); the kernels have returned then."""
        try:
            done = self._native.wait(timeout_s)
        except RuntimeError:
            _in_flight.discard(self)
            raise
        if done:
            _in_flight.discard(self)
            after, self._after = self._after, None
            if after is not None:
                after()
        return done

    def times(self) -> LaunchTimes:
        """Host wall time of each kernel; a kernel that the view leaves out took 0 s."""
        return LaunchTimes(
            {"comm": self._native.comm_seconds, "compute": self._native.compute_seconds}
        )

    def trace(self) -> bytes | None:
        """Instruction record for :mod:`.timeline`, or None."""
        return self._native.trace() if self._traced else None


class AscendAccelerator(AcceleratorBackend):
    """Simulated A2/A3-class NPUs: one process a rank, host threads as cores.

    ``slots`` bounds how many simulated cores of this process run at the same time; the others wait
    their turn. By default the process's CPUs divided by the ranks of the plan, at least 1.

    ``strict``: what strict simulation (``sim/strict.hpp``) shall do; by default as the settings
    ``ascend_strict`` and ``ascend_seed`` say. A hazard ends the call with a RuntimeError that names
    rank, core, pipe, instruction, the buffer's range and the line of the kernel's source.
    """

    name: ClassVar[str] = "ascend"

    def __init__(self, slots: int | None = None, strict: _ascend.Strict | None = None) -> None:
        if slots is not None and slots < 1:
            raise ValueError(f"slots = {slots} is not legal; expected at least 1")
        self._slots = slots
        self._given_strict = strict

    def status(self) -> Status:
        """Usable wherever the native module imports. Says what it knows of a real NPU."""
        try:
            unit = _native().matrix_unit()
        except BackendUnavailable as error:
            return Status(False, str(error), "reinstall mkernel with a C++20 compiler at hand")
        npu = "torch_npu is installed" if _has_torch_npu() else "no torch_npu"
        return Status(True, f"simulator ({unit} matrix unit); real NPU: {npu}, not used")

    def probe(self) -> tuple[Accelerator, ...]:
        """One prototype of the simulated chip."""
        if not self.status().usable:
            return ()
        return (
            Accelerator(
                id="ascend-sim0",
                kind="ascend",
                name=f"simulated A3 ({COMPUTE_CORES} AIC, {COMM_CORES} AIV)",
                index=0,
                emulated=True,
            ),
        )

    def capabilities(self) -> AcceleratorCapabilities:
        """The GEMM ops in three dtypes, both layouts of b, p2p in a node, NIC between nodes."""
        return AcceleratorCapabilities(
            ops=("all_gather_gemm", *_REDUCING),
            dtypes=("float16", "bfloat16", "float32"),
            out_dtypes=("float32", "float16", "bfloat16"),
            b_layouts=("row", "column"),
            alignment_bytes=16,
            transfer_paths=("p2p", "nic"),
            peer_access=True,
            simulated=True,
            compute_cores=COMPUTE_CORES,
            comm_cores=COMM_CORES,
        )

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Zeroed shared host pages."""
        return HostMemory.create(nbytes)

    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map a same-node peer's pages. OSError where they are gone."""
        return HostMemory.attach(descriptor)

    def workspace(self, plan: LaunchPlan) -> Workspace:
        """Slots and signals. ValueError for tiles that the buffers cannot hold."""
        geometry = _geometry(plan)
        return Workspace(nbytes=geometry.workspace_bytes, signals=geometry.signals)

    def model(self, traces: Sequence[bytes], view: View) -> ModelledRun:
        """Replay on the default machine description (``a3.json``)."""
        from mkernel.backends.accelerators.ascend.machine import load_machine
        from mkernel.backends.accelerators.ascend.timeline import model

        return model(traces, load_machine(), view)

    def launch(self, call: Call) -> AscendLaunch:
        """Start both kernels and return at once."""
        plan, native = call.plan, _native()
        geometry = _geometry(plan)
        cores = plan.resources
        if cores.compute_blocks > COMPUTE_CORES or cores.comm_blocks > COMM_CORES:
            raise Unsupported(
                f"plan.resources asks for {cores.compute_blocks} compute and {cores.comm_blocks} "
                f"comm blocks; the chip has {COMPUTE_CORES} AIC and {COMM_CORES} AIV cores"
            )
        shapes = _shapes(plan)
        native.set_slots(self._slots or max(1, len(os.sched_getaffinity(0)) // plan.world_size))
        peers = [(0, 0)] * plan.world_size
        peers[call.rank] = (call.pad, call.workspace)
        for rank, peer in call.peers.items():
            peers[rank] = (peer.pad, peer.workspace)
        started = native.launch(
            geometry=geometry,
            rank=call.rank,
            a=_matrix(call, "a", shapes.a, plan.dtype),
            b=_matrix(call, "b", shapes.b, plan.dtype, column_major=plan.b_layout == "column"),
            out=_matrix(call, "out", shapes.out, plan.out_dtype),
            out_dtype=plan.out_dtype,
            epoch=call.epoch,
            number=call.number & 0xFFFFFFFF,
            pad=call.pad,
            workspace=call.workspace,
            signal_base=call.signal_base,
            region=call.region,
            peers=peers,
            order=_order(plan, call.rank),
            compute_blocks=cores.compute_blocks,
            comm_blocks=cores.comm_blocks,
            node=plan.placement[call.rank].node,
            fifo=call.fifo,
            timeout_s=call.timeout_s,
            view=call.view,
            trace=call.trace,
            strict=self._strict,
        )
        gather = None
        if "gathered" in call.tensors:
            assert isinstance(geometry, native.AgGemmGeometry), "no other op has this output"
            gather = partial(unpack_gathered, call, geometry)
        return AscendLaunch(started, call, gather)

    @cached_property
    def _strict(self) -> _ascend.Strict | None:
        settings = load()
        if self._given_strict is not None or not settings.ascend_strict:
            return self._given_strict
        options: _ascend.Strict = _native().Strict(seed=settings.ascend_seed)
        return options


def record(plan: LaunchPlan, rank: int) -> bytes:
    """The trace that ``rank`` would leave in a call of ``plan``, without running it: no tensors, no
    peers, no arithmetic. For :func:`.timeline.model` on shapes and worlds beyond this machine."""
    node = plan.placement[rank].node
    shapes = _shapes(plan)
    (_, k), (_, n) = shapes.a, shapes.b
    trace: bytes = _native().record(
        geometry=_geometry(plan),
        rank=rank,
        same_node=[placement.node == node for placement in plan.placement],
        order=_order(plan, rank),
        a=(0, k, 1),
        b=(0, 1, k) if plan.b_layout == "column" else (0, n, 1),
        out=(0, n, 1),
        out_dtype=plan.out_dtype,
        compute_blocks=plan.resources.compute_blocks,
        comm_blocks=plan.resources.comm_blocks,
        node=node,
    )
    return trace


def _has_torch_npu() -> bool:
    # Only looked for: importing it needs CANN, and it registers itself with torch.
    return importlib.util.find_spec("torch_npu") is not None
