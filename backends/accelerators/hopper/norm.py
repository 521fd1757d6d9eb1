"""The norm of rows that a call's kernels have summed: by one more kernel behind them.

out ──▶ + residual ──▶ residual_out, and normalised rows ──▶ out
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from mkernel.backends.accelerators.hopper.native import native
from mkernel.backends.accelerators.hopper.operands import aligned, deliver, writable
from mkernel.backends.contracts.accelerator import Call
from mkernel.plan.model import NormStep

if TYPE_CHECKING:
    from mkernel.backends.accelerators.hopper import _hopper


class RowNorm(NamedTuple):
    """What a norm reads and writes, where kernels can address it: the call's own tensors, or copies."""

    weight: torch.Tensor
    residual: torch.Tensor | None
    new: torch.Tensor
    eps: float

    @classmethod
    def of(cls, call: Call) -> RowNorm | None:
        """None where the launch does not normalise."""
        norm: NormStep | None = call.plan.norm
        if norm is None or norm.step != "launch":
            return None
        given = call.tensors
        residual = aligned(given["residual"]) if norm.residual else None
        return cls(
            aligned(given["norm_weight"]), residual, writable(given["residual_out"]), norm.eps
        )

    def addresses(self) -> _hopper.RowNorm:
        """As native code takes them."""
        made: _hopper.RowNorm = native().RowNorm(
            weight=self.weight.data_ptr(),
            residual=0 if self.residual is None else self.residual.data_ptr(),
            residual_out=self.new.data_ptr(),
            eps=self.eps,
        )
        return made

    def deliver(self, call: Call) -> None:
        """Fill the caller's new residual, where kernels write to another."""
        deliver(self.new, call.tensors["residual_out"])


def normalise(call: Call, stream: int) -> None:
    """Queue the norm of ``out``, where the launch has one, behind the kernels that sum it."""
    norm = RowNorm.of(call)
    if norm is None:
        return
    out = writable(call.tensors["out"])
    made, (rows, columns) = native(), out.shape
    made.norm_rows(
        made.RowsOfSums(
            source=aligned(call.tensors["out"]).data_ptr(),
            out=out.data_ptr(),
            rows=rows,
            columns=columns,
            half=out.dtype == torch.float16,
            blocks=0,
            norm=norm.addresses(),
        ),
        stream,
    )
    deliver(out, call.tensors["out"])
    norm.deliver(call)
