"""The contract of a NIC backend: it moves bytes between nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from mkernel.backends.contracts.status import Status
from mkernel.errors import NicError, Unsupported
from mkernel.settings import NicSettings
from mkernel.topology.lanes import NicUse, RankLanes
from mkernel.topology.model import KindName, Model, Nic

NO_SIGNAL = 0xFFFFFFFF
"""The ``signal`` of a put that raises none."""
SELF = 0xFFFFFFFF
"""The ``peer`` of a put that is a completion (:meth:`NicSession.put`)."""
PUT_VALUE_MAX = 255
"""The largest value that every NIC can add in one put. NICs add values from 1 to this; a larger one
may be refused with an ArgumentError."""


class NicCapabilities(Model):
    """The capabilities of an opened NIC. ``ordered``: puts to one peer become visible in order."""

    ordered: bool
    dmabuf: bool
    peermem: bool = False
    """True if the kernel module is loaded by which device memory is registered by its address."""

    def reaches_device(self, exports_dmabuf: bool) -> bool:
        """Return whether ``register_device`` takes the memory of an accelerator that exports
        dmabufs, or of one that does not. The result is the same on all ranks whose machines are
        equal."""
        return self.peermem or (self.dmabuf and exports_dmabuf)


@dataclass(frozen=True)
class LaneStatistics:
    """The puts that one queue pair to a peer carried, as RDMA messages and bytes of data."""

    peer: int
    port: str
    """Id of this rank's port that the queue pair is on."""
    messages: int
    nbytes: int


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
    """Regions registered now, counted by kind: host memory, device memory by dmabuf, device memory
    by peermem."""
    dmabuf_regions: int = 0
    peermem_regions: int = 0
    lanes: tuple[LaneStatistics, ...] = ()
    """The lanes of each peer in the order of :meth:`NicSession.address`, and within a peer in lane
    order."""


class NicSession(ABC):
    """One rank's opened NIC with its proxy thread and command FIFO.

    It reaches each peer over the lanes that the plan gives it, cuts puts as the plan states, and
    makes no choices (:class:`mkernel.topology.lanes.NicSchedule`).

    Order of use: ``address`` for each peer → exchange → ``connect`` → ``start`` → (``register`` →
    exchange → ``bind``) for each region → puts → ``close``. Regions may be added and removed while
    puts of other regions run.

    Failure: the first error sets the pad's abort word (``AbortCode.nic_error``), and from then on
    ``put`` raises, ``flush`` returns False and ``failure`` returns the error. A put outside the
    bound regions is such an error, or is refused when it is queued; it never writes elsewhere.
    """

    @abstractmethod
    def capabilities(self) -> NicCapabilities:
        """Return the capabilities of the opened device and provider."""

    @abstractmethod
    def address(self, peer: int) -> str:
        """Return opaque text that rank ``peer`` passes to its own ``connect`` to reach this rank.
        ArgumentError: this session has not opened the ports of the plan's rails to that peer."""

    @abstractmethod
    def connect(self, peer: int, address: str) -> None:
        """Connect to ``peer`` by the text that its ``address(this rank)`` returned. ArgumentError:
        the peer follows another plan; the error names the difference."""

    @abstractmethod
    def register(self, region: int, address: int, nbytes: int) -> str:
        """Register host memory under a world-wide region number and return the key for the peers."""

    def register_device(
        self,
        region: int,
        address: int,
        nbytes: int,
        dmabuf: int = -1,
        offset: int = 0,
        flush: int = 0,
    ) -> str:
        """Register device memory, which a NIC reaches through a dmabuf or a peermem module, and
        return the key for the peers.

        Args:
            dmabuf: descriptor of a dmabuf that holds the memory; the caller closes it afterwards.
                -1: the accelerator exports none.
            offset: offset of the memory in the dmabuf.
            flush: address of a ``DeviceFlush`` (``backends/transport/mover.hpp``) that is called
                before signals of arrived puts are raised; it must stay valid until the session is
                closed. 0: kernels see at once what a NIC wrote.

        Raises:
            NicError: neither way is available. Unsupported: this NIC supports neither.
        """
        raise Unsupported(f"{type(self).__name__} registers host memory only")

    def deregister(self, region: int, timeout_s: float) -> None:
        """Release a region, and the peers' part of it, once every put queued before is complete;
        the number may be used again. Peers must have stopped putting to the region (their puts fail
        otherwise), and puts of it that are queued meanwhile are refused.

        Raises:
            Timeout: the puts did not end. Unsupported: this NIC keeps its regions until it closes.
        """
        raise Unsupported(f"{type(self).__name__} keeps its regions until it closes")

    @abstractmethod
    def bind(self, region: int, peer: int, key: str) -> None:
        """Set the location of ``region`` at ``peer`` from ``key``, which the peer's ``register``
        returned."""

    @abstractmethod
    def start(self, pad: int, cpus: tuple[int, ...]) -> None:
        """Start the proxy thread. Signals that peers raise here are added to the pad at ``pad``."""

    @property
    @abstractmethod
    def fifo(self) -> int:
        """The address of the ``FifoHandle`` (``backends/transport/fifo_host.hpp``). It is 0 if the
        session takes puts from the host only; accelerators whose kernels push cannot use such a
        session."""

    @abstractmethod
    def put(
        self, peer: int, region: int, local: int, remote: int, nbytes: int, signal: int, value: int
    ) -> None:
        """Queue one put-with-signal from the host, as a kernel would through the FIFO. Offsets are
        relative to the region. With ``nbytes`` 0 only the signal is raised; with ``signal``
        :data:`NO_SIGNAL` none is.

        With ``peer`` :data:`SELF` and ``nbytes`` 0, nothing is put: ``value`` is added to this
        rank's own ``signal`` once everything queued before is complete locally, so that its sources
        may be overwritten.

        Raises:
            ArgumentError. NicError. Timeout: no room in the queue."""

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Return True once every put queued before is complete locally; False at the deadline or if
        the session has failed (``failure`` then returns the error)."""

    @abstractmethod
    def statistics(self) -> NicStatistics:
        """Return the counters so far."""

    @abstractmethod
    def failure(self) -> NicError | None:
        """Return the first error that the NIC reported, or None."""

    @abstractmethod
    def close(self) -> None:
        """Stop the proxy and destroy every queue pair and registration, without draining anything.
        Calling it twice is harmless. Returns within a second even if the network is broken."""


class NicBackend(ABC):
    """A backend that moves bytes between nodes."""

    name: ClassVar[str]
    providers: ClassVar[tuple[str, ...]]
    max_rails: ClassVar[int] = 1
    """The number of ports that one session can use."""
    max_queue_pairs: ClassVar[int] = 1
    """The number of queue pairs that two ranks can have on a rail."""
    kinds: ClassVar[tuple[KindName, ...]] = ()
    """The kinds of devices that the backend drives; ``auto`` takes it if a machine's rails are of
    these kinds. Empty: selected by name only."""

    @abstractmethod
    def status(self, verbs: str) -> Status:
        """Return whether the backend can run here on that verbs provider. Never raises."""

    def details(self, verbs: str) -> tuple[tuple[str, Status], ...]:
        """Return the rows that `mkernel doctor` prints for that provider beside its status: a name
        and a verdict each, for ports and for what they need of the machine. Never raises."""
        return ()

    @abstractmethod
    def probe(self, verbs: str) -> tuple[Nic, ...]:
        """Return the devices that the provider offers; empty if it is not usable."""

    def use(self, settings: NicSettings) -> NicUse:
        """Return the part of the settings that plans use with this backend, limited to what it
        supports. A pure function."""
        return NicUse(
            rails=min(settings.rails or self.max_rails, self.max_rails),
            queue_pairs=min(settings.qps, self.max_queue_pairs),
            stripe_bytes=settings.stripe_bytes,
        )

    @abstractmethod
    def open(self, verbs: str, lanes: RankLanes, settings: NicSettings) -> NicSession:
        """Open a rank's ports, as probed, to reach its peers over these lanes.

        Args:
            settings: settings of queues, time-outs and packets; decisions that ``lanes`` holds are
                not read from them.

        Raises:
            BackendUnavailable: the NIC cannot be opened, or cannot follow that plan; states why.
        """
