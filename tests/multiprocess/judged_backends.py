"""Backends for the judge of `mkernel run`: wrong in one call only, or as a job treats its calls."""

from __future__ import annotations

from typing import ClassVar

import torch

from mkernel.backends.contracts.accelerator import Call, Launch
from mkernel.conformance.faults.altering import Altered, Ended, Honest
from mkernel.errors import Unsupported


class WrongOnce(Altered):
    """Its ``epoch``-th call gives the result of the one before."""

    ops = ("gemm_all_reduce",)
    epoch: ClassVar[int]

    def alter(self, ended: Ended) -> None:
        for tensor, older in ended.previous():
            if ended.call.epoch == self.epoch:
                tensor.copy_(older)


class Fifth(WrongOnce):
    epoch = 5


class Sixth(WrongOnce):
    epoch = 6


class RefusesThird(Honest):
    """Refuses to launch the third call, on all ranks alike. Remembers the epochs of the others."""

    wraps = "ascend"

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    def launch(self, call: Call) -> Launch:
        if call.number == 3:
            raise Unsupported("the third call")
        self.epochs.append(call.epoch)
        return self.inner.launch(call)


class NeedsFilledMemory(Altered):
    """Right, except in a traced call where torch does not fill what it allocates."""

    ops = ("ring_attention",)

    def alter(self, ended: Ended) -> None:
        if ended.call.trace and not torch.empty(1000).isnan().all():
            ended.outputs["out"].zero_()
