"""The session of every NIC backend whose native part is ``_nics.Session``.

A backend opens its device and passes the native session to :class:`NativeSession`. Addresses and
keys travel as JSON text and are validated when they arrive, because they come from another process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mkernel.backends.contracts.nic import (
    NO_SIGNAL,
    SELF,
    LaneStatistics,
    NicCapabilities,
    NicSession,
    NicStatistics,
)
from mkernel.backends.nics import _nics
from mkernel.errors import ArgumentError, MkernelError, NicError, Timeout
from mkernel.plan.model import first_difference
from mkernel.topology.lanes import RankLanes

__all__ = ["MAX_REGIONS", "NO_SIGNAL", "PUT_TIMEOUT_S", "SELF", "Address", "Key", "NativeSession"]

MAX_REGIONS = 1024
MAX_RAILS = 8
MAX_LANES = 64
PUT_TIMEOUT_S = 30.0
"""Seconds for which :meth:`NativeSession.put` waits for room in the command FIFO."""

_U24 = Annotated[int, Field(ge=0, lt=1 << 24)]
_U32 = Annotated[int, Field(ge=0, lt=1 << 32)]
_U64 = Annotated[int, Field(ge=0, lt=1 << 64)]
_Port = Annotated[str, Field(max_length=256)]
_MAX_TEXT = 1 << 15
_T = TypeVar("_T")
_M = TypeVar("_M", bound="_Message")
_Mtu = Literal[256, 512, 1024, 2048, 4096]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Lane(_Message):
    """One of the queue pairs that a rank made for a peer."""

    qp_num: _U24
    psn: _U24
    lid: Annotated[int, Field(ge=0, lt=1 << 16)]
    mtu: _Mtu
    gid: str = Field(pattern=r"^[0-9a-f]{32}$")
    ethernet: bool
    rail: Annotated[int, Field(ge=0, lt=MAX_RAILS)]
    receives: Annotated[int, Field(ge=1, lt=1 << 16)]
    credit_address: _U64
    credit_rkey: _U32


class PairPlan(_Message):
    """The part of the sender's plan, sent in its address, that concerns the two ranks. ``rails``:
    pairs of (sender's port, other rank's port)."""

    rails: Annotated[list[tuple[_Port, _Port]], Field(min_length=1, max_length=MAX_RAILS)]
    queue_pairs: Annotated[int, Field(ge=1, le=MAX_LANES)]
    stripe_bytes: _U64 | None

    @classmethod
    def of(cls, lanes: RankLanes, peer: int) -> PairPlan:
        """Return the part of a rank's plan that concerns it and a peer."""
        return cls(
            rails=[(pair.own, pair.peers) for pair in lanes.rails(peer)],
            queue_pairs=lanes.schedule.queue_pairs,
            stripe_bytes=lanes.schedule.stripe_bytes,
        )

    def seen_from_the_other_end(self) -> PairPlan:
        """Return the same plan from the other rank's point of view."""
        return self.model_copy(update={"rails": [(theirs, own) for own, theirs in self.rails]})


class Address(_Message):
    """The data by which a rank reaches the queue pairs that a peer made for it."""

    nic: str = Field(max_length=64)
    rank: _U32
    peer: _U32
    plan: PairPlan
    lanes: Annotated[list[Lane], Field(min_length=1, max_length=MAX_LANES)]


class Key(_Message):
    """The location of a region at a rank, and its remote keys by rail."""

    rank: _U32
    region: Annotated[int, Field(ge=0, lt=MAX_REGIONS)]
    address: _U64
    nbytes: Annotated[int, Field(ge=1, lt=1 << 64)]
    rkeys: Annotated[list[_U32], Field(min_length=1, max_length=MAX_RAILS)]


def _parse(model: type[_M], argument: str, text: object) -> _M:
    if not isinstance(text, str):  # a peer's message may hold anything
        raise ArgumentError(argument, repr(text)[:80], "text")
    if len(text) > _MAX_TEXT:
        raise ArgumentError(argument, f"{len(text)} characters", f"at most {_MAX_TEXT}")
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "text"
        raise ArgumentError(
            argument, repr(text[:80]), f"a NIC {argument}", why=f"{where}: {first['msg']}"
        ) from error


class NativeSession(NicSession):
    """A NIC session on top of the native one. See :class:`NicSession` for the order of use."""

    def __init__(self, nic: str, lanes: RankLanes, native: _nics.Session) -> None:
        self._nic = nic
        self._lanes = lanes
        self._rank = lanes.rank
        self._ports = [port.id for port in lanes.ports]
        self._native = native
        self._closed = False

    def capabilities(self) -> NicCapabilities:
        """Return the capabilities of the opened device and provider."""
        return NicCapabilities.model_validate(self._native.capabilities(), from_attributes=True)

    def address(self, peer: int) -> str:
        """Make queue pairs for ``peer`` and return the text that it passes to its own ``connect``."""
        pairs = self._lanes.to(peer)
        for pair in pairs:
            if pair.own not in self._ports:
                raise ArgumentError(
                    f"lanes.rails({peer})",
                    f"from port {pair.own!r}",
                    f"ports that rank {self._rank} opens: {', '.join(self._ports)}",
                )
        rails = [self._ports.index(pair.own) for pair in pairs]
        ends = self._setup(lambda: self._native.add_peer(peer, rails))
        return Address(
            nic=self._nic,
            rank=self._rank,
            peer=peer,
            plan=PairPlan.of(self._lanes, peer),
            lanes=[Lane.model_validate(end, from_attributes=True) for end in ends],
        ).model_dump_json()

    def connect(self, peer: int, address: str) -> None:
        """Connect to ``peer`` by the text that its ``address(this rank)`` returned."""
        parsed = _parse(Address, "address", address)
        if (parsed.nic, parsed.rank, parsed.peer) != (self._nic, peer, self._rank):
            raise ArgumentError(
                "address",
                f"that of {parsed.nic} rank {parsed.rank} for rank {parsed.peer}",
                f"what {self._nic} rank {peer} made for rank {self._rank}",
            )
        theirs = parsed.plan.seen_from_the_other_end().model_dump()
        found = first_difference(theirs, PairPlan.of(self._lanes, peer).model_dump(), "nics")
        if found:
            raise ArgumentError(
                "address",
                f"rank {peer}'s, whose plan has {found[0]} = {found[1]!r}",
                f"the plan of rank {self._rank}, which has {found[2]!r}",
            )
        ends = [_nics.Endpoint(**lane.model_dump()) for lane in parsed.lanes]
        self._setup(lambda: self._native.connect(peer, ends), peer)

    def register(self, region: int, address: int, nbytes: int) -> str:
        """Register host memory under a world-wide region number and return the key for the peers."""
        return self._register(region, address, nbytes, device=False, dmabuf=-1, offset=0, flush=0)

    def register_device(
        self,
        region: int,
        address: int,
        nbytes: int,
        dmabuf: int = -1,
        offset: int = 0,
        flush: int = 0,
    ) -> str:
        """Register device memory, by dmabuf or through peermem. NicError: neither is available."""
        return self._register(
            region, address, nbytes, device=True, dmabuf=dmabuf, offset=offset, flush=flush
        )

    def _register(self, region: int, address: int, nbytes: int, **device: Any) -> str:
        if not 0 <= region < MAX_REGIONS:
            raise ArgumentError("region", region, f"0 to {MAX_REGIONS - 1}")
        if nbytes < 1:
            raise ArgumentError("nbytes", nbytes, "at least 1")
        key = self._setup(lambda: self._native.register(region, address, nbytes, **device))
        return Key(
            rank=self._rank, region=region, address=key.address, nbytes=key.bytes, rkeys=key.rkeys
        ).model_dump_json()

    def deregister(self, region: int, timeout_s: float) -> None:
        """Release a region once every put queued before is complete. Puts of other regions go on."""
        if not self._setup(lambda: self._native.deregister(region, timeout_s)):
            failure = self.failure()
            if failure is not None:
                raise failure
            raise Timeout(
                f"rank {self._rank}: puts were still under way after {timeout_s:g} s, so region "
                f"{region} stays registered; nothing more is put of it"
            )

    def bind(self, region: int, peer: int, key: str) -> None:
        """Set the location of ``region`` at ``peer`` from ``key``, which the peer's ``register``
        returned."""
        parsed = _parse(Key, "key", key)
        if (parsed.rank, parsed.region) != (peer, region):
            raise ArgumentError(
                "key",
                f"that of region {parsed.region} at rank {parsed.rank}",
                f"the key of region {region} at rank {peer}",
            )
        native = _nics.RemoteKey(address=parsed.address, bytes=parsed.nbytes, rkeys=parsed.rkeys)
        self._setup(lambda: self._native.bind(region, peer, native))

    def start(self, pad: int, cpus: tuple[int, ...]) -> None:
        """Start the proxy thread. Signals that peers raise here are added to the pad at ``pad``."""
        self._setup(lambda: self._native.start(pad, cpus))

    @property
    def fifo(self) -> int:
        """The address of the ``FifoHandle``. It is valid while this object lives, also after
        ``close`` (nothing drains it then)."""
        return self._native.fifo

    def put(
        self, peer: int, region: int, local: int, remote: int, nbytes: int, signal: int, value: int
    ) -> None:
        """Queue one put-with-signal, as a kernel would. With ``nbytes`` 0 only the signal is
        raised; with ``signal`` :data:`NO_SIGNAL` none is; ``peer`` :data:`SELF` requests a
        completion.

        Raises:
            NicError: the session has failed. Timeout: no room in the FIFO for 30 s.
        """
        limits = self._native.capabilities()
        if signal != NO_SIGNAL and not 0 <= signal <= limits.max_signal:
            raise ArgumentError("signal", signal, f"0 to {limits.max_signal}, or NO_SIGNAL")
        if not 0 <= value <= limits.max_value:
            raise ArgumentError("value", value, f"0 to {limits.max_value}")
        for name, number in (("local", local), ("remote", remote), ("nbytes", nbytes)):
            if not 0 <= number < 1 << 63:
                raise ArgumentError(name, number, "0 to 2**63 - 1")
        result = self._setup(
            lambda: self._native.put(
                peer, region, local, remote, nbytes, signal, value, PUT_TIMEOUT_S
            )
        )
        if result == 0:
            return
        failure = self.failure()
        if failure is not None:
            raise failure
        if result == 2:
            raise Timeout(
                f"the command FIFO of rank {self._rank} stayed full for {PUT_TIMEOUT_S} s"
            )
        raise NicError(
            f"rank {self._rank}'s world was aborted: nothing more is put",
            status="ABORTED",
            peer=peer,
        )

    def flush(self, timeout_s: float) -> bool:
        """Return True once every put queued before is complete locally."""
        return self._setup(lambda: self._native.flush(timeout_s))

    def statistics(self) -> NicStatistics:
        """Return the counters so far; also after ``close``."""
        s = self._native.statistics()
        regions = self._native.registrations()
        return NicStatistics(
            puts=s.puts,
            put_bytes=s.put_bytes,
            signals_sent=s.signals_sent,
            signals_raised=s.signals_raised,
            queue_depth=s.queue_depth,
            stalls=s.stalls,
            host_regions=regions.host,
            dmabuf_regions=regions.dmabuf,
            peermem_regions=regions.peermem,
            lanes=tuple(
                LaneStatistics(lane.peer, self._ports[lane.rail], lane.messages, lane.bytes)
                for lane in self._native.lanes()
            ),
        )

    def failure(self) -> NicError | None:
        """Return the first error that the NIC reported, or None; also after ``close``."""
        f = self._native.failure()
        if f is None:
            return None
        return NicError(
            f"rank {self._rank}: {f.message}",
            status=f.status,
            qp=f.qp,
            wr_id=f.wr_id,
            vendor_err=f.vendor_err,
            peer=f.peer,
        )

    def close(self) -> None:
        """Stop the proxy and release everything. Calling it twice is harmless."""
        if not self._closed:
            self._closed = True
            self._native.close()

    def _setup(self, call: Callable[[], _T], peer: int = -1) -> _T:
        if self._closed:
            raise MkernelError(f"the NIC session of rank {self._rank} is closed; open a new one")
        try:
            return call()
        except _nics.SetupError as error:
            raise NicError(f"rank {self._rank}: {error}", status="SETUP", peer=peer) from error
