"""``streams`` with a library path for one op, which it runs as the other one."""

from __future__ import annotations

from typing import ClassVar

from mkernel.backends.accelerators.streams import StreamsAccelerator
from mkernel.backends.accelerators.streams.worker import StreamsLaunch
from mkernel.backends.contracts.accelerator import Call
from mkernel.plan.capabilities import AcceleratorCapabilities


class TwoPaths(StreamsAccelerator):
    """Remembers the path of every call."""

    name: ClassVar[str] = "two-paths"

    def __init__(self) -> None:
        super().__init__("cpu")
        self.paths: list[str] = []

    def capabilities(self) -> AcceleratorCapabilities:
        claims = super().capabilities()
        return claims.model_copy(update={"library_ops": ("gemm_all_reduce",)})

    def launch(self, call: Call) -> StreamsLaunch:
        self.paths.append(call.plan.path)
        return super().launch(call)
