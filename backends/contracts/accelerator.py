"""The contract of an accelerator backend: it runs the ops on one kind of device."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
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
from mkernel.topology.model import Accelerator, KindName

if TYPE_CHECKING:
    import torch

    from mkernel.backends.transport._transport import AbortCode, Diagnosis


@dataclass(slots=True)
class Call:
    """One launch of a plan on one rank. Nobody changes it; to freeze it would double the time that
    making one takes, which every call pays.

    Attributes:
        plan: the decisions; ``rank``: whose part to run.
        tensors: by the op's argument names, outputs included (``a``, ``b``, ``out``).
        epoch: 1 for the first call that was launched in this world, then one more each, whatever the
            plans; the same on all ranks.
        number: the call's number in the world, for diagnosis: those that were refused count too.
        pad, workspace: addresses of this rank's own; ``areas``: where in the workspace each of the
            plan's areas lies, the same on all ranks.
        peers: same-node ranks. A rank that is absent here is reached through ``fifo`` only.
        region: the region number for NIC puts: the workspace's, or, where the plan's routes are staged,
            that of the staging memory.
        fifo: address of the ``FifoHandle``; 0 where the world has one node.
        timeout_s: every wait of the call ends after this long.
        staging: address of the staging memory; 0 where the plan needs none.
        ordered: whether the NIC keeps order (:class:`mkernel.backends.contracts.nic.NicCapabilities`).
        view, trace, timed: for instrumented backends (:mod:`.instrumented`); others ignore them.
            ``trace``: record instructions. ``timed``: the launch will be asked for its times.
        options: the op's scalars (``scale``).
        group: for backends whose capabilities ask for one.
        symmetric: by tensor name, for those tensors that lie in symmetric memory
            (:func:`mkernel.empty`) on every rank: where each rank's lies, in this process's address
            space; 0 for ranks of other nodes.
        begun_s: when this was made, by CLOCK_MONOTONIC, which is when ranks have agreed on the call.
            After ``timeout_s`` more peers may have left, and nothing may be written to their memory.
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
    """How native code starts calls like one that was launched (``call_starter.h``).

    Attributes:
        starter: a PyCapsule that holds a ``MkernelCallStarter``.
        launches: stands for every call that was started by a starter of this world: its ``wait`` is
            True while none of them is under way. One object a world.
    """

    starter: object
    launches: Launch


class Launch(ABC):
    """A running call. The world waits on it in slices, so that Ctrl-C and aborts are seen.

    A stream-ordered backend's launches end in the order of their calls. What is only being captured
    into a graph counts as ended.
    """

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """True once every kernel of the call has returned (also after an abort or a time-out: the
        world reads the abort record of the signal pad for the outcome)."""

    def results(self) -> Mapping[str, Any]:
        """Outputs whose sizes only the call finds out (MoE); after ``wait`` returned True, on a
        stream-ordered backend right after the launch. Raises what the call refused only when it
        had seen its data (CapacityExceeded), after which the world goes on."""
        return {}

    def again(self) -> Again | None:
        """For calls of the same plan whose tensors have the same shapes, strides, dtypes and places in
        symmetric memory; asked right after the launch, of a stream-ordered backend. None: they are
        launched as this one was."""
        return None

    def calls_over(self) -> int:
        """How many calls that it stands for are known to be over. It only grows, in ``wait``: each is
        given the deadline anew."""
        return 0


class AcceleratorBackend(ABC):
    """Runs the ops on one kind of device."""

    name: ClassVar[str]
    device: str = "cpu"
    """torch's name of the device type whose tensors the ops take."""
    collectives: str = "gloo"
    """torch.distributed backend, where the capabilities ask for a process group."""
    preference: ClassVar[int] = 0
    """``auto`` takes the usable backend with the highest; of equal ones the first by name. 0: by name
    only, as every simulator. The backends that come with mkernel have 20 at most."""
    settings: ClassVar[type[BackendSettings] | None] = None
    """Settings of its own, which ``mkernel doctor --settings`` lists; it reads them with
    :func:`mkernel.settings.load_as`. None: it has none."""
    machine_file: ClassVar[Path | None] = None
    """The data file beside it: constants of its machines and tile menus, each with its source, where
    ``capabilities().constants`` come from. None: it brings none, and nothing is predicted of plans."""
    visibility: ClassVar[Mapping[str, str]] = {}
    """By kind of device: the environment variable by which its driver's runtime hides some of them."""

    @abstractmethod
    def status(self) -> Status:
        """Whether it can run here. Never raises."""

    def software(self, root: Path) -> tuple[tuple[str, Status], ...]:
        """What of its vendor's software is on this machine, for ``mkernel doctor``: names and verdicts.
        Nothing of it is imported or run. ``root``: the folder that holds /usr and /dev."""
        return ()

    @abstractmethod
    def probe(self) -> tuple[Accelerator, ...]:
        """The devices of this machine that it would use; empty where it is not usable. A simulator
        returns one prototype; the world makes as many as it has local ranks."""

    def nic_access(self) -> Status | None:
        """Whether NICs can be given the memory of its devices here, and kernels see what they write:
        registered as dmabufs, or moved for emulated NICs. None: it is host memory. Never raises."""
        return None

    def side_by_side(self, ranks: int) -> Status:
        """Whether so many ranks that share a device run on it at the same time, so that their times
        say something; and how. Never raises."""
        return Status(False, "ranks take turns on a shared device", "give each rank a device")

    @abstractmethod
    def capabilities(self) -> AcceleratorCapabilities:
        """What it claims. The planner and the validation read this, nothing else."""

    def capabilities_on(self, kind: KindName) -> AcceleratorCapabilities:
        """What it would claim on a machine with devices of this kind: to plan for one elsewhere."""
        return self.capabilities()

    @classmethod
    def schedule(cls, request: ScheduleRequest) -> Scheduled:
        """The backend's own part of a plan: all that its launches do and the common part does not say,
        with its predicted times. A pure function, without a device; ranks compare the result, and
        ``workspace`` and ``launch`` read it and decide nothing. Default: the chunks and the order of a
        :class:`mkernel.plan.standard.RowSchedule`."""
        return by_rows(request)

    def group_options(self, timeout: timedelta) -> Any:
        """Options of torch.distributed for the process group, where the capabilities ask for one; None:
        the defaults of :attr:`collectives`. ``timeout``: that the group will have."""
        return None

    def add_outputs(self, own: SymmetricMemory, everywhere: Mapping[int, int]) -> bool:
        """More memory from which it may allocate outputs (``Workspace.outputs``), until the world ends.

        Args:
            everywhere: by rank of this node, itself too: where that rank's lies, in this process's
                address space.

        Returns:
            Whether it takes yet more; the same on all ranks.
        """
        return False

    def allocation(
        self, plan: LaunchPlan, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Any, tuple[Any, ...]] | None:
        """(function, arguments) that make ``out`` of a plan that has memory for it
        (``Workspace.outputs``), row-major and without contents, on the rank's device and the current
        stream. None: torch's own."""
        return None

    def graph_pool(self) -> tuple[int, int] | None:
        """:func:`mkernel.graph_pool`; None: it has no outputs of its own."""
        return None

    def open(self, device: Accelerator) -> None:
        """The one world of this object begins, and has placed this rank on ``device``."""
        return

    def close(self, timeout_s: float) -> bool:
        """The world ends: True once nothing of its calls (replayed graphs too) runs on the device,
        so that its memory can go; False at the deadline: then the world leaves it mapped."""
        return True

    def captured(self) -> bool:
        """Return whether a graph holds calls of the world, and may be replayed unheard."""
        return False

    def await_replays(self) -> threading.Event:
        """Return an event that is set once the device is past all replays that were started so far."""
        raise NotImplementedError(f"accelerator {self.name!r} captures no calls")

    def on(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[Any]:
        """Entered around the allocations and the launch of a call with these tensors, to make their
        device the current one."""
        return nullcontext()

    @abstractmethod
    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Zeroed memory that peers of the node can map and a NIC can register."""

    def allocate_staging(self, nbytes: int) -> SymmetricMemory:
        """Zeroed host memory that kernels of the rank's device can address, and a NIC can register.
        Asked for by who claims ``staged`` among the transfer paths."""
        raise Unsupported(f"accelerator {self.name!r} stages nothing in host memory")

    def format(self, memory: SymmetricMemory) -> None:
        """Prepare fresh memory for workspaces, before any peer can reach it."""
        return

    @abstractmethod
    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map what a same-node peer exported. Raises PeerFailure-free OSError where it is gone."""

    @abstractmethod
    def workspace(self, plan: LaunchPlan) -> Workspace:
        """Symmetric memory and counters that ``launch`` of this plan uses, the same on all ranks."""

    def routing_words(self, world: int, tokens: int, top_k: int, experts: int) -> int:
        """int32 words of ``Call.tensors["routing"]``, in which an MoE dispatch leaves all that later
        calls need of its routing, in this process and any order; the last one is how many rows its
        outputs have. ``experts``: of all ranks."""
        return 1

    def dispatched_rows(self, routing: torch.Tensor) -> int | None:
        """That number, where the host has it without waiting for a device. In the tensor one word of
        the world's follows."""
        return int(routing[-2]) if routing.device.type == "cpu" else None

    @abstractmethod
    def launch(self, call: Call) -> Launch:
        """Start the kernels of one call and return at once."""

    def abort(self, code: AbortCode) -> None:
        """The world is broken: end every wait of this rank's running kernels, and of later ones.
        Any thread, more than once. Backends whose kernels look at the pad's abort word need none."""
        return

    def failure(self) -> tuple[AbortCode, Diagnosis] | None:
        """The first failure that this rank's kernels recorded elsewhere than in the pad, in this
        world. Any thread, often: it must cost no more than a read."""
        return None

    def refused(self) -> MkernelError | None:
        """The first error, since it was last asked, of a stream-ordered call that refused what it only
        saw on the device, after which the world goes on (CapacityExceeded). Asked when all calls are
        over; any thread."""
        return None

    def at_deadline(self) -> str:
        """Who waited for what on this rank when a wait of its kernels passed its deadline, in words,
        for the Timeout's message. Empty: no more is known than the record says. Any thread."""
        return ""
