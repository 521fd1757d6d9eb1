"""The ``cx7`` NIC backend: RC queue pairs on ConnectX cards, or any verbs device that has RC.

A put is a series of RDMA writes; the last one on each queue pair carries an immediate. It is the
signal itself, or a part of the receiver's count if the put is spread over several queue pairs. See
``verbs/immediate.hpp`` for its 32 bits and ``rc_nic.hpp`` for queues and ordering.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mkernel.backends.nics.verbs_backend import VerbsBackend
from mkernel.topology.model import KindName


class Cx7Nic(VerbsBackend):
    """The backend for RC queue pairs over libibverbs, or over the software RDMA device."""

    name: ClassVar[str] = "cx7"
    kinds: ClassVar[tuple[KindName, ...]] = ("cx", "infiniband", "soft")

    def open_native(self, verbs: str, library: str, arguments: dict[str, Any]) -> Any:
        """Open RC queue pairs."""
        from mkernel.backends.nics import _nics

        return _nics.open_cx7(**arguments)
