"""The ``efa`` NIC backend: SRD queue pairs on AWS EFA, or on the software RDMA device.

A put is RDMA writes that each carry an immediate; the receiver counts them and raises the signal
once all have come, for SRD keeps no order. See ``immediate.hpp`` and ``srd_nic.hpp``.
"""

from __future__ import annotations

from typing import ClassVar

from mkernel.backends.base import NicBackend, NicSession, Status
from mkernel.errors import BackendUnavailable
from mkernel.settings import NicSettings
from mkernel.topology.model import Nic

_REINSTALL = "reinstall mkernel: its native NIC module is missing or does not fit this Python"
SYSTEM_LIBRARY = "libefa.so.1"
"""Where the provider ``system`` has ``efadv_*``; any other provider has them in its own library."""


class EfaNic(NicBackend):
    """SRD over libibverbs and libefa, or over the software RDMA device."""

    name: ClassVar[str] = "efa"
    providers: ClassVar[tuple[str, ...]] = ("soft", "system")

    def status(self, verbs: str) -> Status:
        """Whether it can run here on that verbs provider. Never raises."""
        try:
            from mkernel.backends.nics.provider import provider_status
        except ImportError as error:
            return Status(False, str(error), _REINSTALL)
        status = provider_status(verbs)
        if status.usable and not self.probe(verbs):
            return Status(
                False, f"{status.detail}; none is an EFA device", "use nic cx7, or an EFA instance"
            )
        return status

    def probe(self, verbs: str) -> tuple[Nic, ...]:
        """The EFA devices that the provider offers; the software device is one too."""
        try:
            from mkernel.backends.nics.provider import list_nics
        except ImportError:
            return ()
        return tuple(nic for nic in list_nics(verbs) if nic.kind in ("efa", "soft"))

    def open(self, device: str, verbs: str, rank: int, settings: NicSettings) -> NicSession:
        """Open a device by its probed ``name`` or ``id`` (``name:port``).

        Raises:
            BackendUnavailable: no such provider or device, no RDMA write, or it does not come up.
        """
        try:
            from mkernel.backends.nics import _nics
            from mkernel.backends.nics.provider import SYSTEM, library_of
            from mkernel.backends.nics.session import NativeSession
        except ImportError as error:
            raise BackendUnavailable(f"nic 'efa' does not load: {error}; {_REINSTALL}") from error
        name, _, port = device.partition(":")
        try:
            library = library_of(verbs, settings)
            native = _nics.open_efa(
                library=library,
                efa_library=SYSTEM_LIBRARY if verbs == SYSTEM else library,
                device=name,
                port=int(port) if port.isdecimal() else 1,
                queue_depth=settings.queue_depth,
                rnr_retry=settings.rnr_retry,
                gid_index=settings.gid_index,
                fifo_slots=settings.fifo_slots,
            )
        except (OSError, RuntimeError) as error:
            raise BackendUnavailable(f"nic 'efa' on verbs {verbs!r}: {error}") from error
        return NativeSession(self.name, rank, native)
