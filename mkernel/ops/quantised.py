"""Normalised rows in e4m3 with a scale each, as the next product of e4m3 operands takes them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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


def results_of(done: tuple[Tensor, ...], residual: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    """Return what a call with a norm returns, of ``done``, which ends with the new residual: that
    only beside a residual."""
    found = done if residual is not None else done[:-1]
    return found if len(found) > 1 else found[0]


def normalised_results(outputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return a call's normalised rows, in e4m3 with their scales where it quantises, and the new
    residual."""
    names = ("quantised", "quantised_scale") if "quantised" in outputs else ("out",)
    return tuple(outputs[name] for name in (*names, "residual_out"))


def fake_quantised(normed: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make the outputs without data of a call that quantises, from those of one that does not."""
    scales = normed.new_empty((*normed.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(normed, dtype=torch.float8_e4m3fn), scales, new
