"""The ``efa`` NIC backend: SRD queue pairs on AWS EFA, or on the software RDMA device.

A put is a series of RDMA writes that each carry an immediate. Because SRD keeps no order, the
receiver counts them and raises the signal once all have arrived. See ``verbs/immediate.hpp`` and
``srd_nic.hpp``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mkernel.backends.contracts.status import Status
from mkernel.backends.nics.verbs_backend import VerbsBackend
from mkernel.topology.model import KindName, Nic

SYSTEM_LIBRARY = "libefa.so.1"
"""The library that has ``efadv_*`` for provider ``system``; any other provider has them in its own
library."""


class EfaNic(VerbsBackend):
    """The backend for SRD queue pairs over libibverbs and libefa, or over the software RDMA device."""

    name: ClassVar[str] = "efa"
    kinds: ClassVar[tuple[KindName, ...]] = ("efa", "soft")

    def open_native(self, verbs: str, library: str, arguments: dict[str, Any]) -> Any:
        """Open SRD queue pairs, with the library that has ``efadv_*``. RuntimeError: no RDMA write."""
        from mkernel.backends.nics import _nics

        return _nics.open_efa(efa_library=_efa_library(verbs, library), **arguments)

    def abilities(self, verbs: str, nic: Nic) -> tuple[str, Status | None]:
        """Check that the device has RDMA write."""
        from mkernel.backends.nics import _nics
        from mkernel.backends.nics.provider import library_of

        library = library_of(verbs)
        try:
            found = _nics.efa_capabilities(library, _efa_library(verbs, library), nic.name)
        except (OSError, RuntimeError) as error:
            return "", Status(False, str(error), "install rdma-core 46 or later with libefa")
        if found & _nics.EFA_RDMA_WRITE:
            return "RDMA write", None
        return "", Status(
            False,
            f"no RDMA write (device capabilities {found:#x})",
            "use an instance type whose EFA has it, and rdma-core 46 or later",
        )


def _efa_library(verbs: str, library: str) -> str:
    from mkernel.backends.nics.provider import SYSTEM

    return SYSTEM_LIBRARY if verbs == SYSTEM else library
