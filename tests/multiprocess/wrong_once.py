"""Backends that give one wrong result, the previous call's, and right ones otherwise."""

from __future__ import annotations

from typing import Any, ClassVar

from mkernel.backends.base import Call
from mkernel.conformance.faults import Tensors, _Remembers


class WrongOnce(_Remembers):
    """Its ``epoch``-th call is wrong."""

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
