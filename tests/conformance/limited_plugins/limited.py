"""The tiny backends with less: an accelerator without a path between nodes, a NIC without a FIFO."""

from __future__ import annotations

from tiny_accelerator import TinyAccelerator
from tiny_nic import TinyNic, TinySession

from mkernel.backends.contracts.nic import NicSession
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.settings import NicSettings
from mkernel.topology.lanes import RankLanes


class OneNode(TinyAccelerator):
    def capabilities(self) -> AcceleratorCapabilities:
        return super().capabilities().model_copy(update={"transfer_paths": ("p2p",)})


class HostOnlySession(TinySession):
    fifo = 0


class HostOnly(TinyNic):
    def open(self, verbs: str, lanes: RankLanes, settings: NicSettings) -> NicSession:
        return HostOnlySession("tiny0", settings)
