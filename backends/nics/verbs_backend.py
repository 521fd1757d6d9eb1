"""The common part of the NIC backends on verbs: finding devices, and opening one as a session.

The native module is imported late, so that ``mkernel doctor`` can report what is missing.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from mkernel.backends.contracts.nic import NicBackend, NicSession
from mkernel.backends.contracts.status import Status
from mkernel.errors import BackendUnavailable
from mkernel.printable import one_line
from mkernel.settings import NicSettings
from mkernel.topology.lanes import RankLanes
from mkernel.topology.model import Nic

_OPTIONS = (
    "queue_depth",
    "receive_depth",
    "rnr_retry",
    "qp_timeout",
    "retry_count",
    "traffic_class",
    "service_level",
    "gid_index",
)
"""Settings that have the same name in the native options."""
NEVER_STRIPED = (1 << 64) - 1
_REINSTALL = "install libibverbs-dev (infiniband/verbs.h) and then mkernel again, with this Python"


class VerbsBackend(NicBackend):
    """A NIC backend for one kind of queue pair on the devices of a verbs provider."""

    providers: ClassVar[tuple[str, ...]] = ("soft", "system")
    max_rails: ClassVar[int] = 8
    max_queue_pairs: ClassVar[int] = 8

    def serves(self, nic: Nic) -> bool:
        """Return whether this kind of device has such queue pairs."""
        return nic.kind in self.kinds

    @abstractmethod
    def open_native(self, verbs: str, library: str, arguments: dict[str, Any]) -> Any:
        """Open the native session on a device. OSError, RuntimeError.

        Args:
            library: name or path of the provider ``verbs``.
            arguments: the arguments that every native ``open_*`` takes.
        """

    def status(self, verbs: str) -> Status:
        """Return whether the backend can run here on that verbs provider. Never raises."""
        try:
            from mkernel.backends.nics.provider import provider_status
        except ImportError as error:
            return Status(False, f"not built ({one_line(error)})", _REINSTALL)
        status = provider_status(verbs)
        if status.usable and not any(nic.active for nic in self.probe(verbs)):
            return Status(
                False,
                f"{status.detail}; none that is up is of a kind that nic {self.name!r} drives "
                f"({', '.join(self.kinds)})",
                "leave the NIC open (MKERNEL_NIC=auto), or name the one that drives them",
            )
        return status

    def details(self, verbs: str) -> tuple[tuple[str, Status], ...]:
        """Return rows for every port that the backend serves, the library, and access to device
        memory."""
        try:
            from mkernel.backends.nics import report
        except ImportError:
            return ()
        return report.details(verbs, self.serves, self.abilities)

    def abilities(self, verbs: str, nic: Nic) -> tuple[str, Status | None]:
        """Return the device's relevant abilities, in words, and a verdict if it cannot serve."""
        return "", None

    def probe(self, verbs: str) -> tuple[Nic, ...]:
        """Return the ports of the provider that the backend serves."""
        try:
            from mkernel.backends.nics.provider import list_nics
        except ImportError:
            return ()
        return tuple(nic for nic in list_nics(verbs) if self.serves(nic))

    def open(self, verbs: str, lanes: RankLanes, settings: NicSettings) -> NicSession:
        """Open the ports of a rank's lanes.

        Raises:
            BackendUnavailable: there is no such provider or device, it lacks what is needed, or it
                does not come up; or the plan has more ports or queue pairs than it can have.
        """
        self._can_follow(lanes)
        try:
            from mkernel.backends.nics import _nics
            from mkernel.backends.nics.provider import hand_over_mover, library_of, peermem_module
            from mkernel.backends.nics.session import NativeSession
        except ImportError as error:
            raise BackendUnavailable(
                f"nic {self.name!r} is not built ({one_line(error)}); {_REINSTALL}"
            ) from error
        options = _nics.Options()
        for field in _OPTIONS:
            setattr(options, field, getattr(settings, field))
        options.stripe_bytes = lanes.schedule.stripe_bytes or NEVER_STRIPED
        options.peermem = peermem_module() is not None
        try:
            library = library_of(verbs, settings)
            hand_over_mover(library)
            native = self.open_native(
                verbs,
                library,
                {
                    "library": library,
                    "ports": [_nics.PortName(nic.name, nic.port) for nic in lanes.ports],
                    "options": options,
                    "fifo_slots": settings.fifo_slots,
                },
            )
        except (OSError, RuntimeError) as error:
            raise BackendUnavailable(f"nic {self.name!r} on verbs {verbs!r}: {error}") from error
        return NativeSession(self.name, lanes, native)

    def _can_follow(self, lanes: RankLanes) -> None:
        ids = [nic.id for nic in lanes.ports]
        for what, found, most in (
            ("ports", len(ids), self.max_rails),
            (
                "queue pairs of two ranks on each rail",
                lanes.schedule.queue_pairs,
                self.max_queue_pairs,
            ),
        ):
            if not 1 <= found <= most:
                raise BackendUnavailable(
                    f"nic {self.name!r}: the plan has {found} {what} for rank {lanes.rank}; a session "
                    f"has 1 to {most}"
                )
        if len(set(ids)) < len(ids):
            raise BackendUnavailable(
                f"nic {self.name!r}: the plan has a port twice for rank {lanes.rank}: {', '.join(ids)}"
            )
