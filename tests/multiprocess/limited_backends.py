"""Backends that claim less than the ones they are made of, or other paths, as real ones do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mkernel.backends.accelerators.ascend import AscendAccelerator
from mkernel.backends.accelerators.ascend.backend import AscendLaunch
from mkernel.backends.accelerators.streams import StreamsAccelerator
from mkernel.backends.accelerators.streams.worker import StreamsLaunch
from mkernel.backends.contracts.accelerator import AcceleratorBackend, Call
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.topology.model import Accelerator


class GemmsOnly(StreamsAccelerator):
    """``streams`` without MoE and attention."""

    name: ClassVar[str] = "gemms-only"

    def __init__(self) -> None:
        super().__init__("cpu")

    def capabilities(self) -> AcceleratorCapabilities:
        claims = super().capabilities()
        return claims.model_copy(update={"ops": claims.ops[:3]})


class GemmsOnAscend(AscendAccelerator):
    """``ascend`` without MoE and attention, as ``hopper`` is; the plans of its calls are kept."""

    name: ClassVar[str] = "gemms-on-ascend"
    launched: ClassVar[list[str]] = []

    def capabilities(self) -> AcceleratorCapabilities:
        claims = super().capabilities()
        return claims.model_copy(update={"ops": claims.ops[:3]})

    def launch(self, call: Call) -> AscendLaunch:
        self.launched.append(call.plan.op)
        return super().launch(call)


class OtherChip(AscendAccelerator):
    """``ascend`` whose kernels are compiled for one chip, on a machine with real ones of another."""

    name: ClassVar[str] = "other-chip"
    chip: ClassVar[str] = "sm_80"

    def capabilities(self) -> AcceleratorCapabilities:
        claims = super().capabilities()
        return claims.model_copy(update={"simulated": False, "architectures": ("sm_90",)})

    def probe(self) -> tuple[Accelerator, ...]:
        (device,) = super().probe()
        chip = {"emulated": False, "architecture": self.chip}
        return tuple(
            device.model_copy(update={**chip, "id": f"chip{i}", "index": i}) for i in range(4)
        )


class ThatChip(OtherChip):
    """The same, on the chip that they are compiled for."""

    name: ClassVar[str] = "that-chip"
    chip: ClassVar[str] = "sm_90"


class Apart(ThatChip):
    """The same, where only the first two chips, and the last two, reach each other's memory."""

    name: ClassVar[str] = "apart"

    def capabilities(self) -> AcceleratorCapabilities:
        return (
            super().capabilities().model_copy(update={"transfer_paths": ("p2p", "nic", "staged")})
        )

    def no_p2p(self, devices: Sequence[Accelerator]) -> tuple[tuple[str, str], ...]:
        return tuple((one.id, other.id) for one in devices[:2] for other in devices[2:])


class OneNode(AscendAccelerator):
    """``ascend`` whose kernels reach peers of their own node only, as ``hopper``'s."""

    name: ClassVar[str] = "one-node"

    def capabilities(self) -> AcceleratorCapabilities:
        return super().capabilities().model_copy(update={"transfer_paths": ("p2p",)})


class TwoPaths(StreamsAccelerator):
    """``streams`` with a library path for one op, which it runs as the other one; remembers the path of
    every call."""

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


NotInstrumented = type(
    "NotInstrumented",
    (AcceleratorBackend,),
    {
        name: each
        for name, each in vars(StreamsAccelerator).items()
        if name not in ("__dict__", "__weakref__")
    },
)
"""``streams`` without what the contract leaves to a backend's choice."""
