"""Backends for the judge of `mkernel run`: wrong in one call only, or as a job treats its calls."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from mkernel.backends.contracts.accelerator import Call
from mkernel.conformance.faults import Altered, Tensors, _Remembers


class WrongOnce(_Remembers):
    """Its ``epoch``-th call gives the result of the one before."""

    only: ClassVar[str | None] = "gemm_all_reduce"
    epoch: ClassVar[int]

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        older = self.exchange(call, 0, outputs["out"])
        if call.epoch == self.epoch and older is not None:
            outputs["out"].copy_(older)


class Fifth(WrongOnce):
    epoch = 5


class Sixth(WrongOnce):
    epoch = 6


class NeedsFilledMemory(Altered):
    """Right, except in a traced call where torch does not fill what it allocates."""

    only: ClassVar[str | None] = "ring_attention"

    def alter(self, call: Call, outputs: Tensors, results: dict[str, Any], kept: Any) -> None:
        if call.trace and not torch.empty(1000).isnan().all():
            outputs["out"].zero_()
