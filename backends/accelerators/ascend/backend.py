"""The ascend backend: each op as a comm and a compute kernel on simulated NPU cores."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mkernel.backends.accelerators.ascend import races
from mkernel.backends.accelerators.ascend import schedule as schedules
from mkernel.backends.accelerators.ascend.machine import FILE, machine
from mkernel.backends.accelerators.ascend.native import native
from mkernel.backends.accelerators.ascend.settings import AscendSettings
from mkernel.backends.accelerators.ascend.software import software
from mkernel.backends.contracts.accelerator import AcceleratorBackend, Call, Launch
from mkernel.backends.contracts.instrumented import (
    Instrumented,
    InstrumentedLaunch,
    LaunchTimes,
    ModelledRun,
    View,
)
from mkernel.backends.contracts.memory import SymmetricMemory, Workspace
from mkernel.backends.contracts.status import Status
from mkernel.backends.runtime.host_memory import HostMemory
from mkernel.errors import (
    INSTALL_AGAIN,
    ArgumentError,
    BackendUnavailable,
    CapacityExceeded,
    Unsupported,
)
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan
from mkernel.plan.request import Scheduled, ScheduleRequest
from mkernel.settings import load_as
from mkernel.topology.cost import MachineConstants
from mkernel.topology.model import Accelerator

if TYPE_CHECKING:
    from mkernel.backends.accelerators.ascend import _ascend
    from mkernel.backends.accelerators.ascend.op import Op

_OPS = {
    "all_gather_gemm": "gemm:GemmOp",
    "gemm_reduce_scatter": "gemm:GemmOp",
    "gemm_all_reduce": "gemm:GemmOp",
    "moe_dispatch": "moe:MoeRowsOp",
    "moe_dispatch_gemm": "moe:MoeDispatchOp",
    "moe_combine": "moe:MoeCombineOp",
    "ring_attention": "ring_attention:RingAttentionOp",
}
"""The class of each op: ``module:class`` in this package. It is imported on first use, because it
needs torch, which planning alone does not."""


def _op(plan: LaunchPlan) -> Op:
    if plan.op not in _OPS:
        raise Unsupported(f"accelerator 'ascend' does not run {plan.op}")
    return _loaded(_OPS[plan.op])


@cache
def _loaded(where: str) -> Op:
    module, _, name = where.partition(":")
    made: Op = getattr(import_module(f"{__package__}.{module}"), name)()
    return made


_in_flight: set[AscendLaunch] = set()
"""Launches whose kernels may still run. They stay here, and so keep their tensors, even if the
caller drops them."""


class AscendLaunch(Launch, InstrumentedLaunch):
    """A call that runs on simulated cores."""

    def __init__(
        self,
        native: _ascend.Launch,
        call: Call,
        finish: Callable[[], Mapping[str, Any]] | None,
        race_folder: Path | None = None,
    ) -> None:
        """Wrap a native launch; ``AscendAccelerator.launch`` calls this. ``finish``: as in
        :class:`.op.Prepared`. ``race_folder``: the folder for the logs in which races between ranks
        are found."""
        self._native = native
        self._races = race_folder
        self._rank, self._number = call.rank, call.number
        self._finish = finish
        self._results: Mapping[str, Any] = {}
        self._refused: CapacityExceeded | None = None
        self._tensors = tuple(call.tensors.values())
        self._traced = call.trace
        for other in tuple(_in_flight):
            other._finished(0.0)
        _in_flight.add(self)

    def _finished(self, timeout_s: float) -> bool:
        done = True
        # An error is for the owner, which gets it in its own `wait`.
        with contextlib.suppress(RuntimeError):
            done = self._native.wait(timeout_s)
        if done:
            _in_flight.discard(self)
        return done

    def wait(self, timeout_s: float) -> bool:
        """Return True once both kernels have returned. RuntimeError if the simulator refused an
        instruction (the message names core, instruction and buffer range); the kernels have
        returned then."""
        try:
            done = self._native.wait(timeout_s)
        except RuntimeError:
            _in_flight.discard(self)
            raise
        if done:
            _in_flight.discard(self)
            folder, self._races = self._races, None
            if folder is not None:
                races.keep(folder, self._rank, self._number, self._native.race_log())
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    self._results = finish()
                except CapacityExceeded as error:
                    self._refused = error
        return done

    def results(self) -> Mapping[str, Any]:
        """Return what the op's ``finish`` returned; empty before ``wait`` returned True.
        CapacityExceeded."""
        refused, self._refused = self._refused, None
        if refused is not None:
            try:
                raise refused
            finally:
                del refused  # or it and this frame would hold each other
        return self._results

    def times(self) -> LaunchTimes:
        """Return the host wall time of each kernel; a kernel that the view leaves out took 0 s."""
        return LaunchTimes(
            {"comm": self._native.comm_seconds, "compute": self._native.compute_seconds}
        )

    def trace(self) -> bytes | None:
        """Return the instruction record for :mod:`.timeline`, or None."""
        return self._native.trace() if self._traced else None


class AscendAccelerator(AcceleratorBackend, Instrumented):
    """Simulated A2/A3-class NPUs: one process per rank, host threads as cores.

    ``slots`` bounds the number of this process's simulated cores that run at the same time; the
    others wait their turn. The default is the process's CPUs divided by the ranks of the plan, at
    least 1.

    ``strict``: options of strict simulation (``sim/strict.hpp``); the default follows the settings
    ``ascend_strict`` and ``ascend_seed``. A hazard ends the call with a RuntimeError that names
    rank, core, pipe, instruction, the buffer's range and the line of the kernel's source.
    """

    name: ClassVar[str] = "ascend"
    settings = AscendSettings
    machine_file: ClassVar[Path | None] = FILE
    visibility: ClassVar[Mapping[str, str]] = {"ascend": "ASCEND_RT_VISIBLE_DEVICES"}

    def __init__(self, slots: int | None = None, strict: _ascend.Strict | None = None) -> None:
        if slots is not None and slots < 1:
            raise ValueError(f"slots = {slots} is not legal; expected at least 1")
        self._slots = slots
        self._given_strict = strict
        self._newest: _ascend.Launch | None = None

    def status(self) -> Status:
        """Return a usable status wherever the native module imports; it mentions an installed
        torch_npu."""
        try:
            unit = native().matrix_unit()
        except BackendUnavailable as error:
            return Status(False, str(error), INSTALL_AGAIN)
        npu = "; torch_npu is installed, and not used" if _has_torch_npu() else ""
        return Status(True, f"simulator ({unit} matrix unit), by name only{npu}")

    def software(self, root: Path) -> tuple[tuple[str, Status], ...]:
        """Report CANN, torch_npu and the driver of real NPUs."""
        return software(root)

    def probe(self) -> tuple[Accelerator, ...]:
        """Return one prototype of the simulated chip."""
        if not self.status().usable:
            return ()
        chip = machine()
        return (
            Accelerator(
                id="ascend-sim0",
                kind="ascend",
                name=f"simulated A3 ({chip.aic_cores} AIC, {chip.aiv_cores} AIV)",
                index=0,
                emulated=True,
            ),
        )

    def capabilities(self) -> AcceleratorCapabilities:
        """Return the capabilities: all ops in three dtypes, both layouts of b, p2p in a node, NIC
        between nodes."""
        chip = machine()
        return AcceleratorCapabilities(
            ops=tuple(_OPS),
            dtypes=("float16", "bfloat16", "float32"),
            out_dtypes=("float32", "float16", "bfloat16"),
            rounded_partials=True,
            invariant_ops=tuple(op for op in _OPS if op != "moe_combine"),
            b_layouts=("row", "column"),
            pitched=("a", "b"),
            alignment_bytes=16,
            transfer_paths=("p2p", "nic"),
            peer_access=True,
            simulated=True,
            compute_cores=chip.aic_cores,
            comm_cores=chip.aiv_cores,
            constants=_constants(),
        )

    @classmethod
    def schedule(cls, request: ScheduleRequest) -> Scheduled:
        """Choose tiles and chunks, order, cores."""
        return schedules.schedule(request)

    def open(self, device: Accelerator) -> None:
        """Forget the calls of an earlier world."""
        self._newest = None

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Allocate zeroed shared host pages."""
        return HostMemory.create(nbytes)

    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map a same-node peer's pages. OSError if they are gone."""
        return HostMemory.attach(descriptor)

    def workspace(self, plan: LaunchPlan) -> Workspace:
        """Return the inboxes and outboxes of even and odd epochs, scratch, and words
        (``kernels/call.hpp``). ArgumentError for a schedule that the kernels cannot run, such as
        one of tiles that the buffers cannot hold."""
        try:
            g = _op(plan).geometry(plan)
        except ArgumentError:
            raise
        except ValueError as error:
            legal = "one that the kernels of these cores can run"
            raise ArgumentError("plan.schedule", plan.schedule, legal, why=str(error)) from None
        areas = (g.inbox_bytes, g.inbox_bytes, g.outbox_bytes, g.outbox_bytes, g.scratch_bytes)
        return Workspace(areas, signals=g.words)

    def model(self, plan: LaunchPlan, traces: Sequence[bytes], view: View) -> ModelledRun:
        """Replay on the machine description that plans are made with, with NICs as fast as the
        plan's."""
        from mkernel.backends.accelerators.ascend.timeline import model

        return model(traces, machine().with_nics_of(plan.routes), view)

    def routing_words(self, world: int, tokens: int, top_k: int, experts: int) -> int:
        """Return the words of the routing's tables, plus one for the number of rows of the outputs."""
        from mkernel.backends.accelerators.ascend.moe import table_words  # needs torch

        return table_words(world, tokens, top_k, experts) + 1

    def launch(self, call: Call) -> AscendLaunch:
        """Start both kernels and return at once."""
        plan, module = call.plan, native()
        op = _op(plan)
        blocks = op.blocks(plan)
        chip = machine()
        if blocks.cube > chip.aic_cores or blocks.comm + blocks.vector > chip.aiv_cores:
            raise Unsupported(
                f"plan.schedule = {plan.schedule} takes {blocks.cube} AIC and "
                f"{blocks.comm} + {blocks.vector} AIV cores; the chip has {chip.aic_cores} AIC and "
                f"{chip.aiv_cores} AIV cores"
            )
        if self._races is not None and len(call.peers) < plan.world_size - 1:
            raise Unsupported(
                "MKERNEL_ASCEND_RACES looks at worlds of one node: no log has what a NIC does"
            )
        prepared = op.prepare(call)
        module.set_slots(self._slots or max(1, len(os.sched_getaffinity(0)) // plan.world_size))
        peers = [(0, 0)] * plan.world_size
        peers[call.rank] = (call.pad, call.workspace)
        for rank, peer in call.peers.items():
            peers[rank] = (peer.pad, peer.workspace)
        started = module.launch(
            kernels=prepared.kernels,
            rank=call.rank,
            epoch=call.epoch,
            number=call.number & 0xFFFFFFFF,
            pad=call.pad,
            workspace=call.workspace,
            areas=call.areas,
            region=call.region,
            peers=peers,
            blocks=blocks,
            node=plan.placement[call.rank].node,
            fifo=call.fifo,
            begun_s=call.begun_s,
            timeout_s=call.timeout_s,
            view=call.view,
            trace=call.trace,
            strict=self._strict,
            log_races=self._races is not None,
        )
        self._newest = started
        return AscendLaunch(started, call, prepared.finish, self._races)

    def at_deadline(self) -> str:
        """Return, in strict simulation, every core of the newest call that was waiting, and what it
        waited for."""
        return "" if self._newest is None else self._newest.at_deadline

    @cached_property
    def _races(self) -> Path | None:
        settings = load_as(AscendSettings)
        return Path(settings.races) if settings.strict and settings.races is not None else None

    @cached_property
    def _strict(self) -> _ascend.Strict | None:
        settings = load_as(AscendSettings)
        if self._given_strict is not None or not settings.strict:
            return self._given_strict
        options: _ascend.Strict = native().Strict(seed=settings.seed)
        return options


def record(plan: LaunchPlan, rank: int) -> bytes:
    """Return the trace that ``rank`` would leave in a call of ``plan``, without running it: no
    tensors, no peers, no arithmetic. For :func:`.timeline.model` on shapes and worlds beyond this
    machine."""
    node = plan.placement[rank].node
    op = _op(plan)
    prepared = op.record(plan, rank)
    trace: bytes = native().record(
        kernels=prepared.kernels,
        rank=rank,
        same_node=[placement.node == node for placement in plan.placement],
        blocks=op.blocks(plan),
        node=node,
    )
    return trace


def _constants() -> MachineConstants:
    """Return the machine's constants. Settings that affect plans are part of their ``source``, by
    which plans are told apart."""
    made = machine().constants()
    chosen = load_as(AscendSettings).model_dump(
        exclude={"machine", "strict", "races", "seed"}, exclude_defaults=True
    )
    if not chosen:
        return made
    said = ", ".join(f"{name} {value}" for name, value in chosen.items())
    return made.model_copy(update={"source": f"{made.source}; plans with {said}"})


def _has_torch_npu() -> bool:
    # It is only looked for: importing it needs CANN, and it registers itself with torch.
    return importlib.util.find_spec("torch_npu") is not None
