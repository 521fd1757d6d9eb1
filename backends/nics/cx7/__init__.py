"""The ``cx7`` NIC backend: RC queue pairs on ConnectX cards, or any verbs device that has RC.

A put is RDMA writes on one queue pair, of which the last carries the signal as its immediate; see
``immediate.hpp`` for its 32 bits and ``rc_nic.hpp`` for queues and ordering.
"""

from __future__ import annotations

from typing import ClassVar

from mkernel.backends.base import NicBackend, NicSession, Status
from mkernel.errors import BackendUnavailable
from mkernel.settings import NicSettings
from mkernel.topology.model import Nic

_REINSTALL = "reinstall mkernel: its native NIC module is missing or does not fit this Python"


class Cx7Nic(NicBackend):
    """RC over libibverbs, or over the software RDMA device."""

    name: ClassVar[str] = "cx7"
    providers: ClassVar[tuple[str, ...]] = ("soft", "system")

    def status(self, verbs: str) -> Status:
        """Whether it can run here on that verbs provider. Never raises."""
        try:
            from mkernel.backends.nics.provider import provider_status
        except ImportError as error:
            return Status(False, str(error), _REINSTALL)
        return provider_status(verbs)

    def probe(self, verbs: str) -> tuple[Nic, ...]:
        """The ports that the provider offers; EFA devices are left out, they have no RC."""
        try:
            from mkernel.backends.nics.provider import list_nics
        except ImportError:
            return ()
        return tuple(nic for nic in list_nics(verbs) if nic.kind != "efa")

    def open(self, device: str, verbs: str, rank: int, settings: NicSettings) -> NicSession:
        """Open a device by its probed ``name`` or ``id`` (``name:port``).

        Raises:
            BackendUnavailable: no such provider or device, or it does not come up.
        """
        try:
            from mkernel.backends.nics import _nics
            from mkernel.backends.nics.provider import library_of
            from mkernel.backends.nics.session import NativeSession
        except ImportError as error:
            raise BackendUnavailable(f"nic 'cx7' does not load: {error}; {_REINSTALL}") from error
        name, _, port = device.partition(":")
        try:
            native = _nics.open_cx7(
                library=library_of(verbs, settings),
                device=name,
                port=int(port) if port.isdecimal() else 1,
                queue_depth=settings.queue_depth,
                qp_timeout=settings.qp_timeout,
                retry_count=settings.retry_count,
                rnr_retry=settings.rnr_retry,
                gid_index=settings.gid_index,
                fifo_slots=settings.fifo_slots,
            )
        except (OSError, RuntimeError) as error:
            raise BackendUnavailable(f"nic 'cx7' on verbs {verbs!r}: {error}") from error
        return NativeSession(self.name, rank, native)
