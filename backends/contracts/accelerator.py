"""The contract of an accelerator backend: it runs the ops on one kind of device."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from mkernel.backends.contracts.instrumented import View
from mkernel.backends.contracts.memory import PeerMemory, SymmetricMemory, Workspace
from mkernel.backends.contracts.status import Status
from mkernel.errors import MkernelError, Unsupported
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan
from mkernel.plan.request import Scheduled, ScheduleRequest
from mkernel.plan.standard import by_rows
from mkernel.settings import BackendSettings
from mkernel.topology.cost import MachineConstants
from mkernel.topology.model import Accelerator, Topology

if TYPE_CHECKING:
    import torch

    from mkernel.backends.transport._transport import AbortCode


@dataclass(slots=True)
class Call:
    """One launch of a plan on one rank. No code may change it after it is made; it is not frozen,
    because freezing would double the construction time, which every call pays.

    Attributes:
        plan: the decisions; ``rank``: the rank whose part is run.
        tensors: by the op's argument names, outputs included (``a``, ``b``, ``out``).
        epoch: 1 for the first call launched in this world, then one more for each call, whatever
            its plan; the same on all ranks.
        number: the call's number in the world, for diagnosis. Refused calls are counted too.
        pad, workspace: addresses of this rank's own.
        areas: offsets of the plan's areas in the workspace, the same on all ranks.
        peers: same-node ranks. A rank that is absent here is reached through ``fifo`` only.
        region: the region number for NIC puts: the workspace's, or the staging memory's if the
            plan's routes are staged.
        fifo: address of the ``FifoHandle``; 0 if the world has one node.
        timeout_s: the deadline of every wait of the call.
        staging: address of the staging memory; 0 if the plan needs none.
        ordered: True if the NIC keeps order
            (:class:`mkernel.backends.contracts.nic.NicCapabilities`).
        view, trace, timed: for instrumented backends (:mod:`.instrumented`); others ignore them.
            ``trace``: record instructions. ``timed``: the launch's times will be read.
        options: the op's scalars (``scale``).
        group: for backends whose capabilities require one.
        symmetric: for each tensor that lies in symmetric memory (:func:`mkernel.empty`) on every
            rank, by name: the address of each rank's tensor in this process's address space; 0 for
            ranks of other nodes.
        begun_s: CLOCK_MONOTONIC time at which this was made, which is when the ranks agreed on the
            call. More than ``timeout_s`` after it, peers may have left, and nothing may be written
            to their memory.
    """

    plan: LaunchPlan
    rank: int
    tensors: Mapping[str, torch.Tensor]
    epoch: int
    number: int
    pad: int
    workspace: int
    areas: tuple[int, ...]
    peers: Mapping[int, PeerMemory]
    region: int
    fifo: int
    timeout_s: float
    staging: int = 0
    ordered: bool = True
    view: View = "pipelined"
    trace: bool = False
    timed: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    group: torch.distributed.ProcessGroup | None = None
    symmetric: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    begun_s: float = field(default_factory=time.monotonic)


class Again(NamedTuple):
    """A native starter for calls like one that was launched (``call_starter.h``).

    Attributes:
        starter: a PyCapsule that holds a ``MkernelCallStarter``.
        tensors: the names of the tensors that it takes, in the order of their addresses; at most 16.
            Calls that have others are launched as this one was.
        launches: represents every call that a starter of this world started: its ``wait`` returns
            True while none of them is running. One object per world.
    """

    starter: object
    tensors: tuple[str, ...]
    launches: Launch


class Launch(ABC):
    """A running call. The world waits on it in slices, so that Ctrl-C and aborts are noticed.

    A stream-ordered backend's launches end in the order of their calls. A call that is only being
    captured into a graph counts as ended.
    """

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Return True once every kernel of the call has returned, also after an abort or a
        time-out: the world reads the outcome from the abort record of the signal pad."""

    def results(self) -> Mapping[str, Any]:
        """Return outputs whose sizes only the call determines (MoE). Valid after ``wait`` returned
        True; on a stream-ordered backend, right after the launch.

        Raises what the call refused only once it had seen its data (CapacityExceeded); the world
        stays usable after that."""
        return {}

    def again(self) -> Again | None:
        """Return a starter for calls of the same plan whose tensors have the same shapes, strides,
        dtypes and places in symmetric memory. The world calls this right after the launch, on a
        stream-ordered backend. None: such calls are launched as this one was."""
        return None

    def calls_over(self) -> int:
        """Return the number of calls that this object represents and that are known to have ended.
        It only grows, and only in ``wait``; each call gets the full deadline anew."""
        return 0


class AcceleratorBackend(ABC):
    """A backend that runs the ops on one kind of device."""

    name: ClassVar[str]
    device: str = "cpu"
    """torch's name for the device type whose tensors the ops take."""
    collectives: str = "gloo"
    """The torch.distributed backend to use if the capabilities require a process group."""
    preference: ClassVar[int] = 0
    """Priority for ``auto``, which takes the usable backend with the highest value and, among
    equals, the first by name. 0: selected by name only, as every simulator is. The backends that
    come with mkernel have at most 20."""
    settings: ClassVar[type[BackendSettings] | None] = None
    """The backend's own settings, which ``mkernel doctor --settings`` lists; it reads them with
    :func:`mkernel.settings.load_as`. None: it has none."""
    machine_file: ClassVar[Path | None] = None
    """The backend's data file: constants of its machines and tile menus, each with its source.
    ``capabilities().constants`` come from it. None: the backend has none, and plans get no
    predicted times."""
    visibility: ClassVar[Mapping[str, str]] = {}
    """The environment variable by which a driver's runtime hides some devices, by kind of device."""

    @abstractmethod
    def status(self) -> Status:
        """Return the verdict on whether the backend can run here. Never raises."""

    def details(self) -> tuple[tuple[str, Status], ...]:
        """Return the rows that ``mkernel doctor`` prints beside :meth:`status`: a name and a verdict
        each, for what the devices here are set to. Never raises."""
        return ()

    def software(self, root: Path) -> tuple[tuple[str, Status], ...]:
        """List the vendor software found on this machine, for ``mkernel doctor``: names and
        verdicts. None of it is imported or run. ``root``: the folder that holds /usr and /dev."""
        return ()

    @abstractmethod
    def probe(self) -> tuple[Accelerator, ...]:
        """Return the devices of this machine that the backend would use; empty if it is not usable.
        A simulator returns one prototype, of which the world makes as many as it has local ranks."""

    def no_p2p(self, devices: Sequence[Accelerator]) -> tuple[tuple[str, str], ...]:
        """Return the pairs, by id, of these devices of this machine that do not reach each other's
        memory, besides those that the topology's sources report. Never raises."""
        return ()

    def nic_access(self) -> Status | None:
        """Return whether NICs can be given the memory of this backend's devices here, so that
        kernels see what NICs write: registered as dmabufs, or moved for emulated NICs. None: the
        memory is host memory. Never raises."""
        return None

    def side_by_side(self, ranks: int) -> Status:
        """Return whether ``ranks`` ranks that share a device run on it at the same time, so that
        their times are meaningful; the detail states how. Never raises."""
        return Status(False, "ranks take turns on a shared device", "give each rank a device")

    @abstractmethod
    def capabilities(self) -> AcceleratorCapabilities:
        """Return the backend's capabilities. The planner and the validation read nothing else."""

    def capabilities_on(self, device: Accelerator) -> AcceleratorCapabilities:
        """Return the capabilities on a machine elsewhere with devices like ``device``."""
        return self.capabilities()

    def cards_of(self, topology: Topology) -> tuple[MachineConstants, ...]:
        """Return constants of those of a world's devices whose product the capabilities do not know,
        as far as what sources read of them says how fast they are. They come after the capabilities'
        own ``cards``; every rank passes the same nodes."""
        return ()

    def measure(self, machine: Topology) -> MachineConstants | None:
        """Measure the constants of this machine's devices, in seconds; None: the backend measures none,
        and those of a rank on the CPU are taken (:mod:`mkernel.measure`). ``machine``: its topology.
        BackendUnavailable: a device does not answer."""
        return None

    @classmethod
    def schedule(cls, request: ScheduleRequest) -> Scheduled:
        """Return the backend's own part of a plan: everything its launches do that the common part
        does not fix, with its predicted times.

        A pure function that needs no device. Ranks compare the result; ``workspace`` and ``launch``
        read it and decide nothing. The default has the chunks and the order of a
        :class:`mkernel.plan.standard.RowSchedule`."""
        return by_rows(request)

    def group_options(self, timeout: timedelta) -> Any:
        """Return torch.distributed options for the process group, if the capabilities require one.
        None: the defaults of :attr:`collectives`. ``timeout``: the time-out that the group will
        have."""
        return None

    def add_outputs(self, own: SymmetricMemory, everywhere: Mapping[int, int]) -> bool:
        """Add memory from which the backend may allocate outputs (``Workspace.outputs``) until the
        world ends.

        Args:
            everywhere: the address of each rank's memory in this process's address space, by rank
                of this node, this rank included.

        Returns:
            True if the backend takes still more memory; the same on all ranks.
        """
        return False

    def allocation(
        self, plan: LaunchPlan, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Any, tuple[Any, ...]] | None:
        """Return (function, arguments) that allocate ``out`` for a plan that has memory for it
        (``Workspace.outputs``): row-major, uninitialised, on the rank's device and the current
        stream. None: torch allocates it."""
        return None

    def graph_pool(self) -> tuple[int, int] | None:
        """Return the value of :func:`mkernel.graph_pool`; None: the backend has no outputs of its
        own."""
        return None

    def open(self, device: Accelerator) -> None:
        """Begin this object's one world, which has placed this rank on ``device``."""
        return

    def close(self, timeout_s: float) -> bool:
        """End the world. Returns True once none of its calls, replayed graphs included, runs on the
        device, so that its memory can be freed; False at the deadline, in which case the world
        leaves the memory mapped."""
        return True

    def captured(self) -> bool:
        """Return whether a graph holds calls of the world and so may be replayed without its
        knowledge."""
        return False

    def capture(self) -> int:
        """Return the number of the capture into a graph that the current stream is part of, another one
        for each; 0: there is none, or its calls cannot be captured."""
        return 0

    def await_replays(self) -> threading.Event:
        """Return an event that is set once the device has finished all replays started so far."""
        raise NotImplementedError(f"accelerator {self.name!r} captures no calls")

    def on(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[Any]:
        """Return a context that makes the device of these tensors the current one. The world enters
        it around the allocations and the launch of a call."""
        return nullcontext()

    @abstractmethod
    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Allocate zeroed memory that peers of the node can map and a NIC can register."""

    def allocate_staging(self, nbytes: int) -> SymmetricMemory:
        """Allocate zeroed host memory that kernels of the rank's device can address and a NIC can
        register. Called only if the backend lists ``staged`` among its transfer paths."""
        raise Unsupported(f"accelerator {self.name!r} stages nothing in host memory")

    def format(self, memory: SymmetricMemory) -> None:
        """Prepare fresh memory for workspaces, before any peer can reach it."""
        return

    @abstractmethod
    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map the memory that a same-node peer exported. Raises OSError, not PeerFailure, if it is
        gone."""

    @abstractmethod
    def workspace(self, plan: LaunchPlan) -> Workspace:
        """Return the symmetric memory and counters that ``launch`` of this plan uses, the same on
        all ranks."""

    def routing_words(self, world: int, tokens: int, top_k: int, experts: int) -> int:
        """Return the number of int32 words of ``Call.tensors["routing"]``, in which an MoE dispatch
        leaves everything that later calls need of its routing. They are valid in this process only,
        in any order, except that the last one is the number of rows of the dispatch's outputs.
        ``experts``: of all ranks."""
        return 1

    def dispatched_rows(self, routing: torch.Tensor) -> int | None:
        """Return the number of rows of the dispatch's outputs if the host has it without waiting
        for a device. In the tensor, one word of the world's follows that number."""
        return int(routing[-2]) if routing.device.type == "cpu" else None

    @abstractmethod
    def launch(self, call: Call) -> Launch:
        """Start the kernels of one call and return at once."""

    def abort(self, code: AbortCode) -> None:
        """End every wait of this rank's running kernels, and of later ones: the world is broken.
        May be called from any thread, more than once. Backends whose kernels poll the pad's abort
        word need no override."""
        return

    def record(self) -> int:
        """Return the address of the AbortRecord (``transport/diagnosis.hpp``) to which this rank's
        kernels write the first failure in this world; 0: they write it to the pad. It is readable
        as long as the backend is open, and every call reads it before it begins."""
        return 0

    def refused(self) -> MkernelError | None:
        """Return the first error, since the last query, of a stream-ordered call that refused what
        it saw only on the device (CapacityExceeded); the world stays usable after that. Called when
        all calls have ended, from any thread."""
        return None

    def at_deadline(self) -> str:
        """Return text for the Timeout's message that states who waited for what on this rank when a
        wait of its kernels passed its deadline. Empty: no more is known than the record holds. Any
        thread."""
        return ""
