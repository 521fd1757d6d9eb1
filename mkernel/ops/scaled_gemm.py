"""The GEMM ops of e4m3 operands with scales: the way to torch's dispatcher, and the registration.

For torch they are ops of their own, ``torch.ops.mkernel.NAME_scaled``, since they have no derivatives:
a tensor that requires grad is refused by its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mkernel.ops.gemm import GemmOp, copied_to, traced_outputs
from mkernel.ops.plain import seen_by_torch
from mkernel.ops.registration import group_name, ops, register
from mkernel.ops.scales import Scaled, refuse_gradients
from mkernel.world import profiling
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current

SCALED_OPTIONS = "ScalarType? out_dtype=None, bool use_fast_accum=False, int? chunk=None, str group"
"""The end of the schemas of ops of e4m3 operands."""


def scaled_result(
    op: GemmOp,
    a: Tensor,
    b: Tensor,
    scaled: Scaled,
    bias: Tensor | None,
    dim: int,
    *,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    chunk: int | None,
    group: Group,
) -> Tensor:
    """Run one call, through torch's dispatcher where torch has to see it, and return its output.
    ArgumentError: a tensor that requires grad; and what :meth:`GemmOp.call` raises."""
    found: Any = None
    if not torch.compiler.is_compiling():
        if profiling.wanted():
            with profiling.named(op.name):
                return scaled_result(
                    op, a, b, scaled, bias, dim,
                    out=out, out_dtype=out_dtype, chunk=chunk, group=group,
                )  # fmt: skip
        found = op.known(a, b, bias, dim, out, out_dtype, chunk, group, scaled)
        if isinstance(found, Tensor):
            return found
    a, b, bias = op.local(a, b, bias, dim, group)
    given = {"a": a, "b": b, "a_scale": scaled.a, "b_scale": scaled.b, "bias": bias, "out": out}
    refuse_gradients(op.name, **given)
    tensors = (a, b, scaled.a, scaled.b, bias)
    traced = traced_outputs(out, *tensors)
    if traced or (out is None and seen_by_torch(*tensors)):
        registered = getattr(ops, f"{op.name}_scaled")
        dims = {} if op.dim is None else {op.dim: dim}
        result: Tensor = registered(
            *tensors,
            **dims,
            out_dtype=out_dtype or (None if out is None else out.dtype),
            use_fast_accum=scaled.use_fast_accum,
            chunk=chunk,
            group=group_name(group),
        )
        return result if out is None else copied_to("out", out, result, dim)
    return _called(op, a, b, scaled, bias, dim, out, out_dtype, chunk, group, found)


def _called(
    op: GemmOp,
    a: Tensor,
    b: Tensor,
    scaled: Scaled,
    bias: Tensor | None,
    dim: int,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    chunk: int | None,
    group: Group,
    signature: bytes | None,
) -> Tensor:
    done = op.call(
        a, b, bias, scaled=scaled, dim=dim, out=out, out_dtype=out_dtype, chunk=chunk, group=group,
        signature=signature,
    )  # fmt: skip
    result: Tensor = done.outputs["out"]
    return result


def register_scaled(op: GemmOp) -> None:
    """Make the op of e4m3 operands known to torch as ``torch.ops.mkernel.NAME_scaled``."""

    def kernel(
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
        chunk: int | None = None,
        group: str,
        **dims: int,
    ) -> Tensor:
        if profiling.wanted():
            options: dict[str, Any] = {"out_dtype": out_dtype, "chunk": chunk, **dims}
            options["use_fast_accum"] = use_fast_accum
            with profiling.named(op.name):
                return kernel(a, b, a_scale, b_scale, bias, group=group, **options)
        dim, scaled = op.dim_of(dims), Scaled(a_scale, b_scale, use_fast_accum)
        found = op.known(a, b, bias, dim, None, out_dtype, chunk, group, scaled)
        if isinstance(found, Tensor):
            return found
        return _called(op, a, b, scaled, bias, dim, None, out_dtype, chunk, group, found)

    def fake(
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        group: str,
        use_fast_accum: bool = False,
        chunk: int | None = None,
        **dims: int,
    ) -> Tensor:
        return op.fake(a, b, op.dim_of(dims), out_dtype, current(group).size)

    dim = "" if op.dim is None else f"int {op.dim}=0, "
    register(
        f"{op.name}_scaled(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias=None, *, "
        f"{dim}{SCALED_OPTIONS}) -> Tensor",
        kernel,
        fake,
        flops=op.flops,
    )
