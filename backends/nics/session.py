"""The session of every NIC backend whose native part is ``_nics.Session``.

A backend opens its device and hands the native session here; addresses and keys travel as JSON text
and are validated when they arrive, for they come from another process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mkernel.backends.base import NO_SIGNAL, NicCapabilities, NicSession, NicStatistics
from mkernel.backends.nics import _nics
from mkernel.errors import ArgumentError, MkernelError, NicError, Timeout

__all__ = ["MAX_REGIONS", "NO_SIGNAL", "PUT_TIMEOUT_S", "Address", "Key", "NativeSession"]

MAX_REGIONS = 1024
PUT_TIMEOUT_S = 30.0
"""How long :meth:`NativeSession.put` waits for room in the command FIFO."""

_U24 = Annotated[int, Field(ge=0, lt=1 << 24)]
_U32 = Annotated[int, Field(ge=0, lt=1 << 32)]
_U64 = Annotated[int, Field(ge=0, lt=1 << 64)]
_MAX_TEXT = 4096
_T = TypeVar("_T")
_M = TypeVar("_M", bound="_Message")
_Mtu = Literal[256, 512, 1024, 2048, 4096]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Address(_Message):
    """How a rank reaches the queue pair that a peer made for it."""

    nic: str = Field(max_length=64)
    rank: _U32
    peer: _U32
    qp_num: _U24
    psn: _U24
    lid: Annotated[int, Field(ge=0, lt=1 << 16)]
    mtu: _Mtu
    gid: str = Field(pattern=r"^[0-9a-f]{32}$")
    ethernet: bool


class Key(_Message):
    """Where a region lies at a rank, and the key that opens it."""

    rank: _U32
    region: Annotated[int, Field(ge=0, lt=MAX_REGIONS)]
    address: _U64
    nbytes: Annotated[int, Field(ge=1, lt=1 << 64)]
    rkey: _U32


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

    def __init__(self, nic: str, rank: int, native: _nics.Session) -> None:
        self._nic = nic
        self._rank = rank
        self._native = native
        self._closed = False

    def capabilities(self) -> NicCapabilities:
        """Of the opened device and provider."""
        c = self._native.capabilities()
        return NicCapabilities(
            ordered=c.ordered,
            max_message_bytes=c.max_message_bytes,
            max_inline_bytes=c.max_inline_bytes,
            immediate_data=c.immediate_data,
            max_sge=c.max_sge,
            atomics=c.atomics,
            dmabuf=c.dmabuf,
        )

    def address(self, peer: int) -> str:
        """Make a queue pair for ``peer``; the text that it hands to its own ``connect``."""
        end = self._setup(lambda: self._native.add_peer(peer))
        return Address(
            nic=self._nic,
            rank=self._rank,
            peer=peer,
            qp_num=end.qp_num,
            psn=end.psn,
            lid=end.lid,
            mtu=cast(_Mtu, end.mtu),
            gid=end.gid,
            ethernet=end.ethernet,
        ).model_dump_json()

    def connect(self, peer: int, address: str) -> None:
        """Connect to ``peer`` by what its ``address(this rank)`` returned."""
        parsed = _parse(Address, "address", address)
        if (parsed.nic, parsed.rank, parsed.peer) != (self._nic, peer, self._rank):
            raise ArgumentError(
                "address",
                f"that of {parsed.nic} rank {parsed.rank} for rank {parsed.peer}",
                f"what {self._nic} rank {peer} made for rank {self._rank}",
            )
        end = _nics.Endpoint(
            qp_num=parsed.qp_num,
            psn=parsed.psn,
            lid=parsed.lid,
            mtu=parsed.mtu,
            gid=parsed.gid,
            ethernet=parsed.ethernet,
        )
        self._setup(lambda: self._native.connect(peer, end), peer)

    def register(self, region: int, address: int, nbytes: int) -> str:
        """Register memory under a world-wide region number; returns the key for the peers."""
        if not 0 <= region < MAX_REGIONS:
            raise ArgumentError("region", region, f"0 to {MAX_REGIONS - 1}")
        if nbytes < 1:
            raise ArgumentError("nbytes", nbytes, "at least 1")
        key = self._setup(lambda: self._native.register(region, address, nbytes))
        return Key(
            rank=self._rank, region=region, address=key.address, nbytes=key.bytes, rkey=key.rkey
        ).model_dump_json()

    def bind(self, region: int, peer: int, key: str) -> None:
        """Tell where ``region`` lies at ``peer``: what its ``register`` returned."""
        parsed = _parse(Key, "key", key)
        if (parsed.rank, parsed.region) != (peer, region):
            raise ArgumentError(
                "key",
                f"that of region {parsed.region} at rank {parsed.rank}",
                f"the key of region {region} at rank {peer}",
            )
        native = _nics.RemoteKey(address=parsed.address, bytes=parsed.nbytes, rkey=parsed.rkey)
        self._setup(lambda: self._native.bind(region, peer, native))

    def start(self, pad: int, cpus: tuple[int, ...]) -> None:
        """Start the proxy thread. Signals that peers raise here are added to the pad at ``pad``."""
        self._setup(lambda: self._native.start(pad, cpus))

    @property
    def fifo(self) -> int:
        """Address of the ``FifoDevice`` handle; valid while this object lives, also after ``close``
        (nothing drains it then)."""
        return self._native.fifo

    def put(
        self, peer: int, region: int, local: int, remote: int, nbytes: int, signal: int, value: int
    ) -> None:
        """Queue one put-with-signal, as a kernel would. ``nbytes`` 0 raises only the signal;
        ``signal`` :data:`NO_SIGNAL` raises none.

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
        """True once every put queued before is complete locally."""
        return self._setup(lambda: self._native.flush(timeout_s))

    def statistics(self) -> NicStatistics:
        """Counters so far; also after ``close``."""
        s = self._native.statistics()
        return NicStatistics(
            puts=s.puts,
            put_bytes=s.put_bytes,
            signals_sent=s.signals_sent,
            signals_raised=s.signals_raised,
            queue_depth=s.queue_depth,
            stalls=s.stalls,
        )

    def failure(self) -> NicError | None:
        """The first error the NIC reported, or None; also after ``close``."""
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

    def inject_failure(self, peer: int) -> None:
        """Put the queue pair to ``peer`` into its error state, through verbs. For tests."""
        self._setup(lambda: self._native.inject_failure(peer))

    def close(self) -> None:
        """Stop the proxy and release everything. Twice is harmless."""
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
