"""Backends for the judge of `mkernel run`: wrong in one call only, or as a job treats its calls."""

from __future__ import annotations

import os
import time
from typing import ClassVar

import torch

from mkernel.backends.contracts.accelerator import Call, Launch
from mkernel.conformance.faults.altering import Altered, Ended, Honest
from mkernel.errors import Unsupported
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.topology.model import Accelerator


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


class Counted(Honest):
    """Counts the multiply-adds of its products, each of which it makes so many times."""

    times: ClassVar[int] = 1
    work: ClassVar[int] = 0

    def capabilities(self) -> AcceleratorCapabilities:
        claims = self.inner.capabilities()
        assert claims.constants is not None
        slower = {
            f"{dtype}_tflops_per_core": claims.constants.tflops_per_core(dtype) / self.times
            for dtype in ("float16", "bfloat16", "float32")
        }
        constants = claims.constants.model_copy(update=slower)
        return claims.model_copy(update={"constants": constants})

    def launch(self, call: Call) -> Launch:
        shape = call.plan.gemm
        Counted.work += self.times * shape.m * shape.n * shape.k
        for _ in range(self.times - 1):
            launch = self.inner.launch(call)
            while not launch.wait(0.05):
                pass
        return self.inner.launch(call)


class Slowed(Counted):
    """The same, slowed by a setting."""

    times = int(os.environ.get("SLOWED_TIMES", "1"))


class OpensLate(Honest):
    """Opens so many seconds later on the last rank than on the others."""

    seconds: ClassVar[float] = 4.0

    def open(self, device: Accelerator) -> None:
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            time.sleep(self.seconds)
        self.inner.open(device)


class NeverOpens(OpensLate):
    """Hangs as it opens, on the last rank."""

    seconds = 3600.0


class NeedsFilledMemory(Altered):
    """Right, except in a traced call where torch does not fill what it allocates."""

    ops = ("ring_attention",)

    def alter(self, ended: Ended) -> None:
        if ended.call.trace and not torch.empty(1000).isnan().all():
            ended.outputs["out"].zero_()
