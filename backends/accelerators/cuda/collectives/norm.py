"""Sums of rows by Lamport exchanges, and the norm of summed rows, in the kernel that sums them or
in one that follows.

sum_by_mail  terms ──▶ the mail of every peer, or of owners and their sums back ──▶ sums ──▶ out, or
             their norm (``kernels/collectives/sum_rows.hpp``)
normalise    out ──▶ + residual ──▶ residual_out, and normalised rows ──▶ out
Both give normalised rows in e4m3 instead, ``quantised`` and ``quantised_scale``, if the plan says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mkernel.backends.accelerators.cuda.device_world import call_id
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.operands import deliver, writable
from mkernel.backends.accelerators.cuda.prefetch import prefetch_of
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import aligned
from mkernel.errors import ArgumentError, Unsupported
from mkernel.plan.model import GemmShape, LaunchPlan, NormStep, SumShape

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


class RowNorm(NamedTuple):
    """The tensors that a norm reads and writes, at addresses that kernels can use: the call's own,
    or copies. ``written``: those that it writes, by their names in the call."""

    weight: torch.Tensor
    residual: torch.Tensor | None
    written: dict[str, torch.Tensor]
    eps: float

    @classmethod
    def of(cls, call: Call) -> RowNorm | None:
        """Return the norm of a call; None if the launch does not normalise."""
        norm: NormStep | None = call.plan.norm
        if norm is None or norm.step != "launch":
            return None
        given = call.tensors
        residual = aligned(given["residual"]) if norm.residual else None
        names = ("residual_out", *(("quantised", "quantised_scale") if norm.quantises else ()))
        written = {name: writable(given[name]) for name in names}
        return cls(aligned(given["norm_weight"]), residual, written, norm.eps)

    def addresses(self) -> _kernels.RowNorm:
        """Return the addresses as native code takes them."""
        made: _kernels.RowNorm = native().RowNorm(
            weight=self.weight.data_ptr(),
            residual=0 if self.residual is None else self.residual.data_ptr(),
            **{name: each.data_ptr() for name, each in self.written.items()},
            eps=self.eps,
        )
        return made

    def deliver(self, call: Call) -> None:
        """Fill the call's tensors, if kernels write to others."""
        for name, each in self.written.items():
            deliver(each, call.tensors[name])


def rows_of(plan: LaunchPlan, blocks: int, **addresses: Any) -> _kernels.RowsOfSums:
    """Return the rows that a plan sums, as the kernel takes them."""
    shape = plan.shape
    assert isinstance(shape, GemmShape | SumShape)
    made: _kernels.RowsOfSums = native().RowsOfSums(
        rows=shape.m,
        columns=shape.n,
        half=plan.out_dtype == "float16",
        blocks=blocks,
        **addresses,
    )
    return made


def sum_by_mail(
    call: Call,
    world: _kernels.DeviceWorld,
    terms: torch.Tensor,
    blocks: int,
    stream: int,
    twice: bool = False,
    tree: bool = False,
) -> None:
    """Queue the sums of all ranks' ``terms`` into ``out``, normalised if the launch does that.
    ``terms``: packed rows, at an address that kernels can use, of the results' dtype, or, in one
    exchange, float32. ``twice``: in two exchanges, if the launch normalises. ``tree``: in one, added
    as invariant results are."""
    norm, out = RowNorm.of(call), writable(call.tensors["out"])
    given: dict[str, Any] = {"unrounded": terms.dtype == torch.float32, "tree": tree}
    given |= {} if norm is None else {"norm": norm.addresses(), "twice": twice}
    given |= prefetch_of(call)
    sums = rows_of(call.plan, blocks, source=terms.data_ptr(), out=out.data_ptr(), **given)
    native().sum_rows(world.of_call(call_id(call), call.timeout_s), sums, stream)
    deliver(out, call.tensors["out"])
    if norm is not None:
        norm.deliver(call)


def check_tree(plan: LaunchPlan, *, twice: bool = False) -> None:
    """Raise Unsupported for a tree of nodes that kernels do not round to, and ArgumentError for
    invariant results by two Lamport exchanges (``twice``), which add more than two terms in another
    order."""
    invariant = plan.invariant
    if invariant is None:
        return
    if invariant.partial_dtype != plan.out_dtype:
        raise Unsupported(
            f"accelerator {plan.accelerator!r} rounds the nodes of invariant sums to their results' "
            f"dtype, {plan.out_dtype}; partial_dtype is {invariant.partial_dtype}; pass None"
        )
    if twice and plan.world_size > 2:
        raise ArgumentError(
            "plan.schedule.way", "'mail_twice'", "'mail' or 'two_shot', with invariant results"
        )


def normalise(call: Call, stream: int) -> None:
    """Queue the norm of ``out``, if the launch has one, after the kernels that sum it."""
    norm = RowNorm.of(call)
    if norm is None:
        return
    out = writable(call.tensors["out"])
    source = aligned(call.tensors["out"]).data_ptr()
    rows = rows_of(call.plan, 0, source=source, out=out.data_ptr(), norm=norm.addresses())
    native().norm_rows(rows, stream)
    deliver(out, call.tensors["out"])
    norm.deliver(call)
