"""Normalised rows in e4m3 with a scale each, as the next product of e4m3 operands takes them."""

from __future__ import annotations

from torch import Tensor

from mkernel.backends.contracts.scaled import quantised_rows
from mkernel.errors import ArgumentError
from mkernel.ops.around import refuse_gradients


def check_quantise(op: str, quantise: object, norm_weight: Tensor | None, **given: object) -> None:
    """Check ``quantise``. ArgumentError: it is neither None nor ``row``; without a norm; beside
    ``out``, ``out_dtype`` or a tensor whose gradient would be lost.

    Args:
        given: tensors of the call by their names, ``out`` and ``out_dtype`` among them.
    """
    if quantise is None:
        return
    if quantise != "row":
        raise ArgumentError("quantise", repr(quantise), "None or 'row'")
    if norm_weight is None:
        raise ArgumentError("quantise", repr(quantise), "None, without norm_weight")
    for name in ("out", "out_dtype"):
        if given.get(name) is not None:
            raise ArgumentError(name, "given", "None, beside quantise: e4m3 rows are allocated")
    refuse_gradients(op, "where it quantises", norm_weight=norm_weight, **given)


def results_of(
    normed: Tensor, new: Tensor, residual: Tensor | None, quantise: str | None
) -> Tensor | tuple[Tensor, ...]:
    """Assemble what an op returns of normalised rows: in e4m3 with their scales where it quantises,
    and beside a residual the new one."""
    rows = (normed,) if quantise is None else quantised_rows(normed)
    found = rows if residual is None else (*rows, new)
    return found if len(found) > 1 else normed
