"""The two contracts: what an accelerator backend and a NIC backend must provide.

A backend is a class that an entry point names (groups ``mkernel.accelerators`` and
``mkernel.nics``); it is constructed without arguments, cheaply, and imports what it needs lazily,
so that ``mkernel doctor`` can ask every backend what it lacks.

Who does what: the *world* owns symmetric memory, signal pads (always in host memory), epochs and
failure handling; the *accelerator backend* runs kernels on it; the *NIC backend* moves bytes between
nodes. Addresses are plain integers of this process's address space.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from mkernel.errors import NicError, Unsupported
from mkernel.plan.model import DtypeName, Exchange, LaunchPlan
from mkernel.plan.order import Runs
from mkernel.settings import NicSettings
from mkernel.topology.chips import architecture, described
from mkernel.topology.model import Accelerator, AcceleratorKind, Model, Nic, NicKind

if TYPE_CHECKING:
    import torch

    from mkernel.backends.runtime._runtime import AbortCode, Diagnosis

View = Literal["pipelined", "sequential", "compute_only"]
"""How a call is run. ``pipelined``: both kernels at once, the product. ``sequential``: the
communication kernel first, compute after it on every rank. ``compute_only``: no communication at
all; chunks of other ranks count as present, so results are meaningless and only the time counts.
Every view uses up an epoch, so views may follow one another in any order."""


@dataclass(frozen=True)
class Status:
    """Whether a backend or provider can be used here; if not, why, and the one thing to do."""

    usable: bool
    detail: str
    remedy: str = ""


class AcceleratorCapabilities(Model):
    """What an accelerator backend claims; the conformance kit holds it to exactly this."""

    ops: tuple[str, ...]
    dtypes: tuple[DtypeName, ...]
    out_dtypes: tuple[DtypeName, ...]
    mixed_dtypes: bool = True
    """Whether the output's dtype may differ from the inputs'."""
    rounded_partials: bool = False
    """Whether a sum over ranks may add results of single ranks that were rounded to the output's
    dtype, each once; else everything is float32 until the end."""
    b_layouts: tuple[Literal["row", "column"], ...]
    alignment_bytes: int
    transfer_paths: tuple[str, ...]
    peer_access: bool
    multicast: bool = False
    simulated: bool = False
    compute_cores: int
    comm_cores: int
    chunk_unit: Literal["tiles", "rows"] = "tiles"
    """What the chunks of GEMM ops are made of; those of other ops are rows."""
    overlaps: bool = True
    """Whether communication and compute run at the same time; else one chunk is best."""
    row_chunks: int = 4
    """Chunks of a rank's rows by default, where chunks are made of rows and the backend overlaps; the
    planner looks for a better number unless it is 1."""
    kernel_a_chunk: bool = False
    """Whether each chunk is computed by a kernel of its own, in whole waves; else one takes tiles as
    their data comes."""
    chunk_invariant: bool = True
    """Whether results are bit-identical for every chunk size."""
    stream_ordered: bool = False
    """Whether a call is only queued on the device when the op returns, as torch's own ops are. What
    breaks then surfaces at the next call, at ``mkernel.synchronize()`` or at ``finalize()``."""
    orders: tuple[Runs, ...] = ("node",)
    """Orders in which its calls can consume other ranks' rows, source by source; the default first.
    One, where kernels have an order of their own."""
    exchanges: tuple[Exchange, ...] = ("direct",)
    """How its calls can exchange between nodes; the default first."""
    library_ops: tuple[str, ...] = ()
    """Ops that also run as a library's product and a collective (``LaunchPlan.path``), in a world of
    one node. The planner takes the faster path, or the one that ``MKERNEL_PATH`` names."""
    kinds: tuple[AcceleratorKind, ...] = ()
    """Kinds of devices that it runs on; empty: any."""
    architectures: tuple[str, ...] = ()
    """Chips that its kernels run on (``sm_90``); empty: any of these kinds."""
    constants: str | None = None
    """Name of the shipped constants (``topology/data``) of its machine, where not its own."""
    process_group: bool = False
    """Whether calls need a torch.distributed group (``Call.group``). What crosses nodes goes through
    it; no NIC session is opened."""
    carrier: str = "torch.distributed"
    """What the process group is, in words, for plans and reports."""

    def misfit(self, device: Accelerator) -> str | None:
        """Why calls cannot run on a device, as what the backend "is" or "has"; None: they can, as far
        as one can tell. An emulated device is the backend's own."""
        if device.emulated:
            return None
        if self.simulated:
            return f"is a simulator, and {device.name} is a real device"
        if self.kinds and device.kind not in self.kinds:
            return f"runs on {', '.join(self.kinds)} devices, and {device.name} is {device.kind}"
        if self.architectures and architecture(device) not in self.architectures:
            kernels = ", ".join(self.architectures)
            return f"has kernels for {kernels} only, not for {described(device)}"
        return None

    @property
    def between_nodes(self) -> bool:
        """Whether calls have a way to ranks of other nodes: puts of a NIC, or a process group."""
        return self.process_group or "nic" in self.transfer_paths

    def dtype_pairs(self) -> tuple[tuple[DtypeName, DtypeName], ...]:
        """Every claimed (dtype of the inputs, dtype of the output)."""
        return tuple(
            (dtype, out)
            for dtype in self.dtypes
            for out in self.out_dtypes
            if self.mixed_dtypes or out == dtype
        )


NO_SIGNAL = 0xFFFFFFFF
"""As a put's ``signal``: raise none."""
PUT_VALUE_MAX = 255
"""Every NIC adds values of 1 to this in one put; more may be refused with an ArgumentError."""


class NicCapabilities(Model):
    """What an opened NIC does. ``ordered``: puts to one peer become visible in order."""

    ordered: bool
    max_message_bytes: int
    max_inline_bytes: int
    immediate_data: bool
    max_sge: int
    atomics: bool
    dmabuf: bool


class SymmetricMemory(ABC):
    """One rank's piece of a symmetric allocation, or a mapping of a peer's."""

    address: int
    nbytes: int

    @abstractmethod
    def export(self) -> dict[str, Any]:
        """JSON-safe descriptor that a rank of the *same node* passes to ``attach``."""

    def dmabuf(self) -> int | None:
        """A new dmabuf descriptor of device memory, from its address on, for a NIC; the caller's to
        close. None: it is host memory. OSError: the device exports none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release the mapping and the memory, the latter once no tensor of it is left. Twice is
        harmless. Nothing else may use it any more."""

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A row-major tensor over the bytes from ``offset`` on, which keeps them mapped. For
        :func:`mkernel.empty`; ValueError where it does not fit, Unsupported where there is none."""
        raise Unsupported(f"{type(self).__name__} cannot be seen as a tensor")


@dataclass(frozen=True)
class Workspace:
    """What one plan needs on every rank: ``nbytes`` of symmetric memory, zeroed and then formatted
    by the backend, and a run of ``signals`` consecutive counters in the signal pad.

    ``shared``: the plans of a world that say so may use the same memory, in any order (calls of a
    world run one after another). A later plan may get larger memory than an earlier one.
    """

    nbytes: int
    signals: int
    shared: bool = False


@dataclass(frozen=True)
class PeerMemory:
    """A same-node peer as kernels see it: its signal pad and workspace, mapped here."""

    pad: int
    workspace: int


@dataclass(slots=True)
class Call:
    """One launch of a plan on one rank. Nobody changes it; to freeze it would double the time that
    making one takes, which every call pays.

    Attributes:
        plan: the decisions; ``rank``: whose part to run.
        tensors: by the op's argument names, outputs included (``a``, ``b``, ``out``).
        epoch: 1 for the plan's first call in this world, then one more each call.
        number: the call's number in the world, for diagnosis.
        pad, workspace: addresses of this rank's own; ``signal_base``: first counter of the plan.
        peers: same-node ranks. A rank that is absent here is reached through ``fifo`` only.
        region: the workspace's region number for NIC puts.
        fifo: address of the ``FifoDevice`` handle; 0 where the world has one node.
        timeout_s: every wait of the call ends after this long. trace: record instructions.
        timed: the launch will be asked for its times.
        options: the op's scalars (``scale``) and, for ``moe_combine``, the dispatch's ``state``.
        group: for backends whose capabilities ask for one.
        symmetric: by tensor name, for those tensors that lie in symmetric memory
            (:func:`mkernel.empty`) on every rank: where each rank's lies, in this process's address
            space; 0 for ranks of other nodes.
    """

    plan: LaunchPlan
    rank: int
    tensors: Mapping[str, torch.Tensor]
    epoch: int
    number: int
    pad: int
    workspace: int
    signal_base: int
    peers: Mapping[int, PeerMemory]
    region: int
    fifo: int
    timeout_s: float
    view: View = "pipelined"
    trace: bool = False
    timed: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    group: torch.distributed.ProcessGroup | None = None
    symmetric: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class LaunchTimes:
    """Host wall time of a finished launch, in seconds, by kernel (``comm``, ``compute``)."""

    seconds: dict[str, float] = field(default_factory=dict)


class Span(NamedTuple):
    """One piece of work on a track of a modelled timeline. Microseconds from the launch. ``peer``: the
    rank written to, notified or waited for."""

    name: str
    start_us: float
    duration_us: float
    chunk: int | None = None
    peer: int | None = None


class Track(NamedTuple):
    """What one core, or one pipe of it, did. ``kernel`` is ``comm`` or ``compute``."""

    rank: int
    name: str
    kernel: str
    spans: list[Span]


@dataclass(frozen=True)
class KernelSpan:
    """When a kernel (``comm`` or ``compute``) of a rank ran."""

    rank: int
    kernel: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class ModelledRun:
    """A call on the modelled machine: *predicted* times, never measured ones.

    ``total_us``: launch to the end of the last kernel of any rank. ``tracks``: one a core; ``pipes``:
    the same in detail, one a pipe of a core that did something.
    """

    machine: str
    view: View
    total_us: float
    kernels: tuple[KernelSpan, ...]
    tracks: tuple[Track, ...]
    pipes: tuple[Track, ...] = ()

    def kernel_us(self, kernel: str) -> float:
        """Longest duration of that kernel over the ranks; 0 where it did not run."""
        return max((k.end_us - k.start_us for k in self.kernels if k.kernel == kernel), default=0.0)


class Launch(ABC):
    """A running call. The world waits on it in slices, so that Ctrl-C and aborts are seen.

    A stream-ordered backend's launches end in the order of their calls. What is only being captured
    into a graph counts as ended.
    """

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """True once every kernel of the call has returned (also after an abort or a time-out: the
        world reads the abort record of the signal pad for the outcome)."""

    @abstractmethod
    def times(self) -> LaunchTimes:
        """Wall times; only after ``wait`` returned True."""

    def results(self) -> Mapping[str, Any]:
        """Outputs whose sizes only the call finds out (MoE); after ``wait`` returned True, on a
        stream-ordered backend right after the launch."""
        return {}

    @abstractmethod
    def trace(self) -> bytes | None:
        """This rank's instruction record for the timed model, or None where none was asked for."""


class AcceleratorBackend(ABC):
    """Runs the ops on one kind of device."""

    name: ClassVar[str]
    device: str = "cpu"
    """torch's name of the device type whose tensors the ops take."""
    collectives: str = "gloo"
    """torch.distributed backend, where the capabilities ask for a process group."""
    preference: ClassVar[int] = 0
    """``auto`` takes the usable backend with the highest; of equal ones the first by name. 0: by name
    only, as every simulator. Those of ``hopper`` and ``streams`` are 20 and 10."""

    @abstractmethod
    def status(self) -> Status:
        """Whether it can run here. Never raises."""

    @abstractmethod
    def probe(self) -> tuple[Accelerator, ...]:
        """The devices of this machine that it would use; empty where it is not usable. A simulator
        returns one prototype; the world makes as many as it has local ranks."""

    @abstractmethod
    def capabilities(self) -> AcceleratorCapabilities:
        """What it claims. The planner and the validation read this, nothing else."""

    def capabilities_on(self, kind: AcceleratorKind) -> AcceleratorCapabilities:
        """What it would claim on a machine with devices of this kind: to plan for one elsewhere."""
        return self.capabilities()

    def group_options(self, timeout: timedelta) -> Any:
        """Options of torch.distributed for the process group, where the capabilities ask for one; None:
        the defaults of :attr:`collectives`. ``timeout``: that the group will have."""
        return None

    def open(self, device: Accelerator) -> None:
        """A world begins in this process, and placed this rank on ``device``. What an earlier world
        aborted or failed at is forgotten."""
        return

    def close(self, timeout_s: float) -> bool:
        """The world ends: True once nothing of its calls (replayed graphs too) runs on the device,
        so that its memory can go; False at the deadline: then the world leaves it mapped."""
        return True

    def on(self, tensors: Mapping[str, torch.Tensor]) -> AbstractContextManager[Any]:
        """Entered around the allocations and the launch of a call with these tensors, to make their
        device the current one."""
        return nullcontext()

    @abstractmethod
    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Zeroed memory that peers of the node can map and a NIC can register."""

    def format(self, memory: SymmetricMemory) -> None:
        """Prepare fresh memory for workspaces, before any peer can reach it."""
        return

    @abstractmethod
    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map what a same-node peer exported. Raises PeerFailure-free OSError where it is gone."""

    @abstractmethod
    def workspace(self, plan: LaunchPlan) -> Workspace:
        """Symmetric memory and signals that ``launch`` of this plan uses, the same on all ranks."""

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

    def at_deadline(self) -> str:
        """Who waited for what on this rank when a wait of its kernels passed its deadline, in words,
        for the Timeout's message. Empty: no more is known than the record says. Any thread."""
        return ""

    def model(self, traces: Sequence[bytes], view: View) -> ModelledRun | None:
        """Replay the traces of all ranks of one call on a model of the machine.

        None where the backend keeps no modelled time (it runs on a real device).
        """
        return None


@dataclass(frozen=True)
class NicStatistics:
    """Counters of one rank's proxy since ``start``."""

    puts: int
    put_bytes: int
    signals_sent: int
    signals_raised: int
    queue_depth: int
    stalls: int
    host_regions: int = 0
    """Regions registered now, by how: host memory, device memory by dmabuf, by peermem."""
    dmabuf_regions: int = 0
    peermem_regions: int = 0


class NicSession(ABC):
    """One rank's opened NIC with its proxy thread and command FIFO.

    Order of use: ``address`` for each peer → exchange → ``connect`` → ``start`` → (``register`` →
    exchange → ``bind``) for each region → puts → ``close``. Regions may be added and taken out while
    puts of others run.

    Failure: the first error sets the pad's abort word (``AbortCode.nic_error``), and from then on
    ``put`` raises, ``flush`` returns False and ``failure`` says what it was. A put outside of what
    is bound is such an error, or is refused when it is queued; it never writes elsewhere.
    """

    @abstractmethod
    def capabilities(self) -> NicCapabilities:
        """Of the opened device and provider."""

    @abstractmethod
    def address(self, peer: int) -> str:
        """Opaque text that rank ``peer`` hands to its own ``connect`` to reach this rank."""

    @abstractmethod
    def connect(self, peer: int, address: str) -> None:
        """Connect to ``peer`` by what its ``address(this rank)`` returned."""

    @abstractmethod
    def register(self, region: int, address: int, nbytes: int) -> str:
        """Register host memory under a world-wide region number; returns the key for the peers."""

    def register_device(
        self, region: int, address: int, nbytes: int, dmabuf: int = -1, offset: int = 0
    ) -> str:
        """The same for device memory, which a NIC reaches through a dmabuf or a peermem module.

        Args:
            dmabuf: descriptor of one that holds the memory, the caller's to close afterwards; -1:
                its accelerator exports none. offset: of the memory in it.

        Raises:
            NicError: neither way is open. Unsupported: this NIC knows neither.
        """
        raise Unsupported(f"{type(self).__name__} registers host memory only")

    def deregister(self, region: int, timeout_s: float) -> None:
        """Let go of a region and of the peers' part of it, once every put queued before is complete;
        the number may be used again. Peers must have stopped putting to it (else they fail), and
        puts of it that are queued meanwhile are refused.

        Raises:
            Timeout: the puts did not end. Unsupported: this NIC keeps its regions until it closes.
        """
        raise Unsupported(f"{type(self).__name__} keeps its regions until it closes")

    @abstractmethod
    def bind(self, region: int, peer: int, key: str) -> None:
        """Tell where ``region`` lies at ``peer``: what its ``register`` returned."""

    @abstractmethod
    def start(self, pad: int, cpus: tuple[int, ...]) -> None:
        """Start the proxy thread. Signals that peers raise here are added to the pad at ``pad``."""

    @property
    @abstractmethod
    def fifo(self) -> int:
        """Address of the ``FifoDevice`` handle (``backends/nics/fifo_device.hpp``). 0 where the
        session takes puts from the host only; accelerators whose kernels push cannot use it then."""

    @abstractmethod
    def put(
        self, peer: int, region: int, local: int, remote: int, nbytes: int, signal: int, value: int
    ) -> None:
        """Queue one put-with-signal from the host, as a kernel would through the FIFO. Offsets are
        relative to the region; ``nbytes`` 0 raises only the signal, ``signal`` :data:`NO_SIGNAL`
        none. ArgumentError, NicError, Timeout (no room in the queue)."""

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """True once every put queued before is complete locally; False at the deadline or when the
        session has failed (then ``failure`` says how)."""

    @abstractmethod
    def statistics(self) -> NicStatistics:
        """Counters so far."""

    @abstractmethod
    def failure(self) -> NicError | None:
        """The first error the NIC reported, or None."""

    @abstractmethod
    def close(self) -> None:
        """Drain nothing, stop the proxy, destroy every queue pair and registration. Twice is
        harmless. Returns within a second even when the network is broken."""


class NicBackend(ABC):
    """Moves bytes between nodes."""

    name: ClassVar[str]
    providers: ClassVar[tuple[str, ...]]
    max_rails: ClassVar[int] = 1
    """Devices that one session can use."""
    kinds: ClassVar[tuple[NicKind, ...]] = ()
    """Kinds of devices that it drives; ``auto`` takes it where a machine's rails are of them. Empty: by
    name only."""

    @abstractmethod
    def status(self, verbs: str) -> Status:
        """Whether it can run here on that verbs provider. Never raises."""

    def details(self, verbs: str) -> tuple[tuple[str, Status], ...]:
        """What `mkernel doctor` says of that provider beside its status: a name and a verdict each,
        for ports and for what they need of the machine. Never raises."""
        return ()

    @abstractmethod
    def probe(self, verbs: str) -> tuple[Nic, ...]:
        """The devices that provider offers; empty where it is not usable."""

    @abstractmethod
    def open(self, device: str, verbs: str, rank: int, settings: NicSettings) -> NicSession:
        """Open a device by its probed ``name``, or several, joined by commas, up to ``max_rails``.
        Raises BackendUnavailable."""
