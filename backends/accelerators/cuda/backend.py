"""The cuda backend: library products, copy engines, exchanges by mail. Those upon it have kernels of
their own.

Its capabilities can be queried without torch; a world's session (``device_session.py``) needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mkernel.backends.accelerators.cuda.attention import tuning as attention_tuning
from mkernel.backends.accelerators.cuda.capabilities import (
    ATTENTION,
    HOPPER,
    INVARIANT,
    MOE,
    MOST_RANKS,
    NO_SCALED_EXPERTS,
    PREFETCHES,
    SUMS,
    experts,
    library_ops,
    one_node_ops,
    scale_modes,
    torch_is_fit,
)
from mkernel.backends.accelerators.cuda.gemm import tuning
from mkernel.backends.accelerators.cuda.isolation import isolation
from mkernel.backends.accelerators.cuda.machine import FILE, machine
from mkernel.backends.accelerators.cuda.moe import tuning as moe_tuning
from mkernel.backends.accelerators.cuda.mover import nic_access, offer_mover
from mkernel.backends.accelerators.cuda.native import FIRST
from mkernel.backends.accelerators.cuda.native import native as cuda
from mkernel.backends.accelerators.cuda.native_kernels import missing
from mkernel.backends.accelerators.cuda.settings import CudaSettings
from mkernel.backends.accelerators.cuda.software import software
from mkernel.backends.contracts.accelerator import AcceleratorBackend, Call
from mkernel.backends.contracts.instrumented import Instrumented
from mkernel.backends.contracts.memory import SymmetricMemory, Workspace
from mkernel.backends.contracts.status import Status
from mkernel.errors import BackendUnavailable, MkernelError
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import AttentionShape, LaunchPlan
from mkernel.plan.request import Scheduled, ScheduleRequest
from mkernel.settings import load_as, variable
from mkernel.topology.cost import MachineConstants
from mkernel.topology.model import Accelerator, Topology
from mkernel.topology.sources.chips import capability, cores

if TYPE_CHECKING:
    import torch

    from mkernel.backends.accelerators.cuda import _cuda
    from mkernel.backends.accelerators.cuda.device_session import DeviceLaunch, DeviceSession
    from mkernel.backends.accelerators.cuda.dispatch import Executor
    from mkernel.backends.transport import _transport


class CudaAccelerator(AcceleratorBackend, Instrumented):
    """The backend for CUDA devices, and the base of others; those of a node reach each other's memory.

    A rank uses one device: torch's current one when the world is made, or, if the process has not
    used CUDA by then, the one on which the topology places it. Calls run on torch's current stream
    and one after another; with CUDA graphs, only the streams order replays and other calls.

    Attributes:
        devices: compute capabilities that it runs on, in words. remedy: what to do without such a
            device. tunings: what schedules GEMM ops and sums, attention, MoE.
    """

    name: ClassVar[str] = "cuda"
    preference: ClassVar[int] = 15
    machine_file: ClassVar[Path | None] = FILE
    settings: ClassVar[type[CudaSettings]] = CudaSettings
    visibility: ClassVar[Mapping[str, str]] = {"cuda": "CUDA_VISIBLE_DEVICES"}
    device = "cuda"
    devices: ClassVar[str] = f"{FIRST[0]}.{FIRST[1]} or later"
    remedy: ClassVar[str] = "use accelerator streams"
    tunings: ClassVar[tuple[Callable[[ScheduleRequest], Scheduled], ...]] = (
        tuning.schedule,
        attention_tuning.schedule,
        moe_tuning.schedule,
    )

    def __init__(self) -> None:
        """Make the backend without starting anything."""
        self._session: DeviceSession | None = None
        self._left: list[DeviceSession] = []  # their worlds ended before their kernels did
        self._capabilities: AcceleratorCapabilities | None = None

    @staticmethod
    def runs_on(capability: tuple[int, int]) -> bool:
        """Return whether its kernels run on devices of that compute capability."""
        return capability >= FIRST

    @staticmethod
    def executor_of(plan: LaunchPlan) -> type[Executor]:
        """Return the executor of the plan's calls. Unsupported."""
        from mkernel.backends.accelerators.cuda.dispatch import executor_of

        return executor_of(plan)

    def found(self) -> list[_cuda.DeviceInfo]:
        """Return this process's devices that it runs on."""
        return [each for each in cuda().devices() if self.runs_on((each.major, each.minor))]

    def status(self) -> Status:
        """Return a usable status if the kernels were built and a device, its driver and torch can
        run them."""
        lacking = self.missing()
        if lacking is not None:
            return lacking
        found = self.found()
        if not found:
            return Status(False, f"no device of compute capability {self.devices}", self.remedy)
        import torch

        if not torch.cuda.is_available():
            return Status(
                False,
                f"torch {torch.__version__} sees no CUDA device",
                "install a torch that is built for the driver's CUDA",
            )
        driver = cuda().versions()[0]
        return Status(
            True,
            f"{len(found)} x {found[0].name} ({found[0].multiprocessors} SMs), driver for CUDA "
            f"{driver // 1000}.{driver % 1000 // 10}; NVLink multicast is not used",
        )

    @staticmethod
    def missing() -> Status | None:
        """Return what prevents its kernels from running here; None if nothing does."""
        return missing()

    def details(self) -> tuple[tuple[str, Status], ...]:
        """Report devices that do not reach each other's memory, and modes that keep them from it."""
        apart = next(iter(self.no_p2p(self.probe())), None)
        if apart is None:
            return isolation()
        detail = (
            f"{apart[1]} is not reached by {apart[0]}: ranks on devices that do not reach each other's "
            "memory are nodes of their own, and what they exchange rests in pinned host memory"
        )
        return ("peer access", Status(True, detail)), *isolation()

    def software(self, root: Path) -> tuple[tuple[str, Status], ...]:
        """Report the compiler that the kernels are built with."""
        return software(root)

    def probe(self) -> tuple[Accelerator, ...]:
        """Return this process's devices that it runs on."""
        if not self.status().usable:
            return ()
        return tuple(
            Accelerator(
                id=f"cuda{device.index}",
                kind="cuda",
                name=device.name,
                index=device.index,
                pci=device.pci.lower(),
                architecture=f"sm_{device.major}{device.minor}",
                cores=device.multiprocessors,
                clock_mhz=device.clock_mhz or None,
                memory_gbs=device.memory_gbs or None,
            )
            for device in self.found()
        )

    def no_p2p(self, devices: Sequence[Accelerator]) -> tuple[tuple[str, str], ...]:
        """Return the pairs that CUDA reports; all of them where the setting ``peer_access`` is 0."""
        pairs = combinations(devices, 2)
        if not load_as(self.settings).peer_access:
            return tuple((one.id, other.id) for one, other in pairs)
        found = [] if self.missing() is not None else self.found()
        address = {each.index: each.pci.lower() for each in found}
        apart = {
            frozenset((address[each.index], address[other]))
            for each in found
            for other in each.out_of_reach
            if other in address
        }
        return tuple(
            (one.id, other.id) for one, other in pairs if frozenset((one.pci, other.pci)) in apart
        )

    def nic_access(self) -> Status:
        """Return what the driver reports for the first device."""
        if self.missing() is not None or not self.found():
            return Status(False, "there is no device")
        return nic_access(self.found()[0].index)

    def side_by_side(self, ranks: int) -> Status:
        """Return whether ranks run side by side: they do under MPS, if their kernels take separate
        multiprocessors."""
        shared = super().side_by_side(ranks)
        found = [] if self.missing() is not None else self.found()
        if not found or not found[0].mps:
            return shared
        each, there = load_as(self.settings).multiprocessors, found[0].multiprocessors
        if each is None or each * ranks > there:
            name = variable(("multiprocessors",), str(self.settings.model_config["env_prefix"]))
            return Status(
                False,
                f"under MPS {ranks} ranks would hold multiprocessors that the others need",
                f"set {name} to {there // ranks} or fewer",
            )
        return Status(
            True, f"{ranks} ranks share a device under MPS, {each} of {there} multiprocessors each"
        )

    def capabilities(self) -> AcceleratorCapabilities:
        """Return the capabilities: the GEMM and MoE ops by a library's products, AllReduce, and ring
        attention by a library on parts, in half precision; e4m3 operands of the GEMM ops."""
        if self._capabilities is None:
            found = [] if self.missing() is not None else self.found()
            first = found[0] if found else None
            self._capabilities = self._claims(
                HOPPER if first is None else (first.major, first.minor),
                machine().cores if first is None else first.multiprocessors,
            )
        return self._capabilities

    def capabilities_on(self, device: Accelerator) -> AcceleratorCapabilities:
        """Return the capabilities on a machine elsewhere; of devices that are not known, Hopper's."""
        there = capability(device) or HOPPER
        return self._claims(there, cores(device) or machine().cores)

    def cards_of(self, topology: Topology) -> tuple[MachineConstants, ...]:
        """Return the constants of devices of which only figures are known."""
        return machine().cards_of(topology)

    def measure(self, machine: Topology) -> MachineConstants | None:
        """Measure products, memory, copies and exchanges of the first device; all else follows from the
        constants of its card, as far as these bound it."""
        from mkernel.backends.accelerators.cuda.measuring import measured

        devices, claims = self.probe(), self.capabilities()
        every = claims.constants_by(None, self.cards_of(machine))
        return measured(devices, every) if devices else None

    def _claims(self, there: tuple[int, int], processors: int) -> AcceleratorCapabilities:
        most = load_as(self.settings).multiprocessors
        processors = min(processors, most or processors)
        ops = (*library_ops(), *SUMS, *experts(), *(ATTENTION if torch_is_fit() else ()))
        claims: dict[str, Any] = {
            "ops": ops,
            "dtypes": ("bfloat16", "float16"),
            "out_dtypes": ("bfloat16", "float16"),
            "mixed_dtypes": False,
            "rounded_partials": True,
            "b_layouts": ("row", "column"),
            "pitched": ("a", "b"),
            "packed_shards": True,
            "adds_bias": True,
            "adds_norm": True,
            "quantises_norms": True,
            "scale_modes": scale_modes(there),
            "why_no_scaled_experts": NO_SCALED_EXPERTS,
            "alignment_bytes": 16,
            "transfer_paths": ("p2p", "nic", "staged"),
            "peer_access": True,
            "multicast": False,
            "compute_cores": processors,
            "comm_cores": processors,
            "most_cores": most,
            "sums_in_rank_order": False,
            "most_ranks": MOST_RANKS,
            "stream_ordered": True,
            "settles_puts": True,
            "invariant_ops": INVARIANT,
            "library_ops": library_ops(),
            "only_library_ops": library_ops(),
            "one_node_ops": one_node_ops(),
            "prefetch_ops": PREFETCHES,
            "hierarchical_ops": (*MOE, "ring_attention"),
            "far_returns": ("ranks",),
            "routing_of_ids": True,
            "reuses_routing": "in_one_node",
            "head_dims": tuple(
                each for each in machine().attention.head_dims if each <= 128 or there >= HOPPER
            ),
            "positions": machine().attention.positions,
            "attention_layouts": ("heads", "positions"),
            "documents": ("ring_attention",),
            "kinds": ("cuda",),
            "architectures": (f"sm_{FIRST[0]}{FIRST[1]}+",),
            "constants": machine().constants,
            "cards": machine().of_others,
            "link_gbs": load_as(self.settings).link_gbs,
        }
        return AcceleratorCapabilities(**{**claims, **self.claimed()})

    def claimed(self) -> dict[str, Any]:
        """Return what a backend upon this one claims besides, or instead."""
        return {}

    @classmethod
    def schedule(cls, request: ScheduleRequest) -> Scheduled:
        """Choose what is sent, and how, as well as what the kernels upon it do."""
        products, attention, moe = cls.tunings
        if isinstance(request.plan.shape, AttentionShape):
            return attention(request)
        return moe(request) if request.plan.op in MOE else products(request)

    # ---- a world's life, and its calls -----------------------------------------------------------

    def open(self, device: Accelerator) -> None:
        """Choose the rank's device and make what its calls need there."""
        from mkernel.backends.accelerators.cuda.device_session import DeviceSession

        self._session = DeviceSession(device, self)
        offer_mover()

    def close(self, timeout_s: float) -> bool:
        """Wait for the device and release it."""
        session, self._session = self._session, None
        if session is None or session.close(timeout_s):
            return True
        self._left.append(session)
        return False

    def on(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[Any]:
        """Return a context of the rank's device. ArgumentError for tensors on another one."""
        return self._open_session().on(tensors)

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Allocate zeroed memory of the rank's device."""
        return self._open_session().allocate(nbytes)

    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map a same-node peer's memory for the rank's device. OSError if it is gone."""
        return self._open_session().attach(descriptor)

    def format(self, memory: SymmetricMemory) -> None:
        """Write the number of the first call to the words where kernels read it."""
        self._open_session().format(memory)

    def allocate_staging(self, nbytes: int) -> SymmetricMemory:
        """Allocate zeroed host memory that kernels access at the same addresses."""
        return self._open_session().allocate_staging(nbytes)

    def add_outputs(self, own: SymmetricMemory, everywhere: Mapping[int, int]) -> bool:
        """Add memory for outputs of AllReduces that peers write."""
        return self._open_session().add_outputs(own, everywhere)

    def allocation(
        self, plan: LaunchPlan, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Any, tuple[Any, ...]] | None:
        """Return the allocation of such an output."""
        return self._open_session().allocation(plan, shape, dtype)

    def graph_pool(self) -> tuple[int, int] | None:
        """Return a pool for a graph's outputs that peers write."""
        return self._open_session().outputs.graph_pool()

    def workspace(self, plan: LaunchPlan) -> Workspace:
        """Return a workspace, shared by all plans of a world. It holds its own flags; signals are
        for other nodes."""
        return self.executor_of(plan).workspace(plan)

    def routing_words(self, world: int, tokens: int, top_k: int, experts: int) -> int:
        """Return the words of the ids of all ranks, of tables for the device, and of the number of
        rows of the outputs (kernels/moe/tables.cuh)."""
        from mkernel.backends.accelerators.cuda.moe.executors import sizes_of

        words: int = sizes_of(world, tokens, top_k, experts).table_words()
        return words

    def dispatched_rows(self, routing: torch.Tensor) -> int | None:
        """Return the number of rows of a dispatch of this process."""
        from mkernel.backends.accelerators.cuda.moe.executors import known_height

        return known_height(routing)

    def captured(self) -> bool:
        """Return whether a CUDA graph holds calls of the world."""
        return self._session is not None and self._session.captured

    def capture(self) -> int:
        """Return CUDA's number of the capture of torch's current stream."""
        return 0 if self._session is None else self._session.capture()

    def await_replays(self) -> threading.Event:
        """Return an event that is set once the rank's whole device is done, because no stream
        reveals what it replays."""
        return self._open_session().await_device()

    def refused(self) -> MkernelError | None:
        """Return the error of a dispatch that had more rows than its capacity."""
        return None if self._session is None else self._session.refused()

    def launch(self, call: Call) -> DeviceLaunch:
        """Queue the call on torch's current stream, after the world's previous one."""
        return self._open_session().launch(call)

    def abort(self, code: _transport.AbortCode) -> None:
        """Set the word that waiting kernels poll."""
        session = self._session
        if session is not None:
            session.control.abort(code)

    def record(self) -> int:
        """Return where kernels record their first time-out."""
        return 0 if self._session is None else self._session.control.record

    def _open_session(self) -> DeviceSession:
        if self._session is None:
            raise BackendUnavailable(
                f"accelerator {self.name!r} is in no world; call mkernel.init() first"
            )
        return self._session
