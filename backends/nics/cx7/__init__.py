"""The ``cx7`` NIC backend: RC queue pairs on ConnectX cards, or any verbs device that has RC.

A put is RDMA writes of which the last on a queue pair carries an immediate: the signal itself, or,
where the put is spread over several queue pairs, a part of what the receiver counts. See
``verbs/immediate.hpp`` for its 32 bits and ``rc_nic.hpp`` for queues and ordering.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mkernel.backends.nics.verbs_backend import VerbsBackend
from mkernel.topology.model import KindName


class Cx7Nic(VerbsBackend):
    """RC over libibverbs, or over the software RDMA device."""

    name: ClassVar[str] = "cx7"
    kinds: ClassVar[tuple[KindName, ...]] = ("cx", "infiniband", "soft")

    def open_native(self, verbs: str, library: str, arguments: dict[str, Any]) -> Any:
        """RC queue pairs."""
        from mkernel.backends.nics import _nics

        return _nics.open_cx7(**arguments)
