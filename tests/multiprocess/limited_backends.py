"""Backends that claim less than the ones they are made of, as real ones do."""

from __future__ import annotations

from typing import ClassVar

from mkernel.backends.accelerators.ascend import AscendAccelerator
from mkernel.backends.accelerators.streams import StreamsAccelerator
from mkernel.backends.base import AcceleratorCapabilities


class GemmsOnly(StreamsAccelerator):
    """``streams`` without MoE and attention."""

    name: ClassVar[str] = "gemms-only"

    def __init__(self) -> None:
        super().__init__("cpu")

    def capabilities(self) -> AcceleratorCapabilities:
        claims = super().capabilities()
        return claims.model_copy(update={"ops": claims.ops[:3]})


class OneNode(AscendAccelerator):
    """``ascend`` whose kernels reach peers of their own node only, as ``hopper``'s."""

    name: ClassVar[str] = "one-node"

    def capabilities(self) -> AcceleratorCapabilities:
        return super().capabilities().model_copy(update={"transfer_paths": ("p2p",)})
