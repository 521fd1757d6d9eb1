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
"""As a put's ``signal``: raise none."""
SELF = 0xFFFFFFFF
"""As a put's ``peer``: it is a completion (:meth:`NicSession.put`)."""
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
    peermem: bool = False
    """The kernel's module is loaded by which devices' memory is registered by its address."""

    def reaches_device(self, exports_dmabuf: bool) -> bool:
        """Whether ``register_device`` takes memory of an accelerator that exports dmabufs, or does not.
        What is so on one rank is so on all whose machines are equal."""
        return self.peermem or (self.dmabuf and exports_dmabuf)


@dataclass(frozen=True)
class LaneStatistics:
    """What one queue pair to a peer was given of puts: RDMA messages, and bytes of data."""

    peer: int
    port: str
    """Id of the port of this rank that it is on."""
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
    """Regions registered now, by how: host memory, device memory by dmabuf, by peermem."""
    dmabuf_regions: int = 0
    peermem_regions: int = 0
    lanes: tuple[LaneStatistics, ...] = ()
    """Of each peer in the order of :meth:`NicSession.address`, its lanes in theirs."""


class NicSession(ABC):
    """One rank's opened NIC with its proxy thread and command FIFO.

    It reaches each peer over the lanes that the plan gives it, cuts puts as the plan says, and has
    nothing to choose (:class:`mkernel.topology.lanes.NicSchedule`).

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
        """Opaque text that rank ``peer`` hands to its own ``connect`` to reach this rank.
        ArgumentError: the plan's rails to it are none that this session has opened."""

    @abstractmethod
    def connect(self, peer: int, address: str) -> None:
        """Connect to ``peer`` by what its ``address(this rank)`` returned. ArgumentError: it follows
        another plan; names what differs."""

    @abstractmethod
    def register(self, region: int, address: int, nbytes: int) -> str:
        """Register host memory under a world-wide region number; returns the key for the peers."""

    def register_device(
        self,
        region: int,
        address: int,
        nbytes: int,
        dmabuf: int = -1,
        offset: int = 0,
        flush: int = 0,
    ) -> str:
        """The same for device memory, which a NIC reaches through a dmabuf or a peermem module.

        Args:
            dmabuf: descriptor of one that holds the memory, the caller's to close afterwards; -1:
                its accelerator exports none. offset: of the memory in it. flush: address of a
                ``DeviceFlush`` (``backends/transport/mover.hpp``) that is called before signals of
                arrived puts are raised; 0: kernels see at once what a NIC wrote. It stays valid
                until the session is closed.

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
        """Address of the ``FifoHandle`` (``backends/transport/fifo_host.hpp``). 0 where the
        session takes puts from the host only; accelerators whose kernels push cannot use it then."""

    @abstractmethod
    def put(
        self, peer: int, region: int, local: int, remote: int, nbytes: int, signal: int, value: int
    ) -> None:
        """Queue one put-with-signal from the host, as a kernel would through the FIFO. Offsets are
        relative to the region; ``nbytes`` 0 raises only the signal, ``signal`` :data:`NO_SIGNAL`
        none.

        With ``peer`` :data:`SELF` and ``nbytes`` 0, nothing is put: ``value`` is added to the own
        rank's ``signal`` once all that was queued before is complete locally, so that its sources may
        be written again.

        Raises:
            ArgumentError. NicError. Timeout: no room in the queue."""

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
    """Ports that one session can use."""
    max_queue_pairs: ClassVar[int] = 1
    """Queue pairs that two ranks can have on a rail."""
    kinds: ClassVar[tuple[KindName, ...]] = ()
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

    def use(self, settings: NicSettings) -> NicUse:
        """What plans make of the settings on this backend: no more than it can do. Pure."""
        return NicUse(
            rails=min(settings.rails or self.max_rails, self.max_rails),
            queue_pairs=min(settings.qps, self.max_queue_pairs),
            stripe_bytes=settings.stripe_bytes,
        )

    @abstractmethod
    def open(self, verbs: str, lanes: RankLanes, settings: NicSettings) -> NicSession:
        """Open a rank's ports, as probed, to reach its peers over these lanes.

        Args:
            settings: of queues, time-outs and packets; what ``lanes`` decides is not read there.

        Raises:
            BackendUnavailable: it cannot be opened, or cannot follow that plan; says why.
        """
