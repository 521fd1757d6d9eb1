"""The steps of a GEMM op on its own rank around a launch, as the plan says: operands become matrices
of rows that the backend takes, results become what the caller asked for.

    a [.., K] ──(copy a)──▶ rows ─▶┐          ┌─▶ rows ──(+ bias)──(copy out)──▶ out [.., N]
    b [K, N] ──(copy b)──────────▶ │  launch  │
    a_scale, b_scale ──(copy)────▶ │          │
    bias [N] ──(copy bias)───────▶ │ (+ bias) │
    residual [.., N] ──▶ rows ───▶ │ (+ norm) │─▶ rows ──(+ residual, norm)──▶ residual_out [.., N]
                                   └──────────┴─▶ rows ──(copy gathered)──▶ gathered [.., K]

A norm comes behind a bias; where the launch does not normalise, neither adds it the residual.

Rows are counted with the dimension that ranks share outermost, so that those of a rank follow each
other. What is allocated lies so too: where that dimension is not the first, the result is a view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mkernel.backends.contracts.norm import add_and_normalise
from mkernel.ops import validate
from mkernel.ops.common import tensor_signature
from mkernel.plan.model import LaunchPlan

EPS = 1e-6
"""The eps of a norm, where the caller names none."""


class Normed(NamedTuple):
    """The weight and eps of a norm, and the residual that is added to the rows before it. Packed."""

    residual: Tensor | None
    weight: Tensor
    eps: float

    @property
    def given(self) -> dict[str, Tensor]:
        """Return the tensors by their names in a launch."""
        there = {} if self.residual is None else {"residual": self.residual}
        return there | {"norm_weight": self.weight}


def check_norm(
    norm: Normed,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    out: torch.dtype,
    device: str,
    *,
    matrix: str = "b",
    like: str = "a",
) -> None:
    """Check the norm of a result of that shape and dtype ``out``, with the columns of ``matrix``, where
    ``like`` has ``dtype``. ShapeError, DtypeError, LayoutError, ArgumentError."""
    validate.vector("norm_weight", norm.weight, shape[-1], dtype, matrix=matrix, like=like)
    validate.on_device("norm_weight", norm.weight, device)
    validate.contiguous("norm_weight", norm.weight)
    if norm.residual is not None:
        validate.on_device("residual", norm.residual, device)
        validate.output("residual", norm.residual, shape, out, 0)


def norm_signatures(norm: Normed) -> tuple[object, ...]:
    """Return all that the checks of a call see of a norm."""
    return (tensor_signature(norm.residual), tensor_signature(norm.weight), norm.eps)


def as_rows(x: Tensor, dim: int) -> Tensor:
    """Reshape [.., K] to [rows, K], ``dim`` outermost; a view where ``x`` lies so, else a copy."""
    return x if x.dim() == 2 and dim == 0 else x.movedim(dim, 0).flatten(0, -2)


def from_rows(rows: Tensor, lead: Sequence[int], dim: int) -> Tensor:
    """Return a packed matrix [rows, N] as the view [.., N] whose rows it holds.

    Args:
        lead: the sizes of the other dimensions, ``dim`` first.
    """
    if len(lead) == 1:
        return rows
    return rows.view(*lead, rows.shape[-1]).movedim(0, dim)


def before(plan: LaunchPlan, given: Mapping[str, Tensor], dim: int) -> dict[str, Tensor]:
    """Prepare the tensors of the launch: ``given`` as matrices; copied, or new ones, where the plan
    says so."""
    launched = {}
    for name, tensor in given.items():
        if name == "b":
            launched[name] = _repacked(plan, tensor) if "b" in plan.copies else tensor
        elif name in ("bias", "norm_weight"):
            launched[name] = tensor.contiguous() if name in plan.copies else tensor
        elif name.endswith("_scale"):
            launched[name] = _scale_as_launched(name, tensor, dim)
        elif name not in plan.copies:
            launched[name] = as_rows(tensor, dim)
        elif name == "a":
            packed = tensor.movedim(dim, 0).contiguous()
            launched[name] = packed.view(-1, tensor.shape[-1])
        else:
            rows = tensor.numel() // tensor.shape[-1]
            launched[name] = tensor.new_empty((rows, tensor.shape[-1]))
    return launched


def _scale_as_launched(name: str, scale: Tensor, dim: int) -> Tensor:
    if name == "gathered_scale":
        return scale
    if scale.numel() == 1:
        return scale.view(1, 1)
    return as_rows(scale, dim).contiguous() if name == "a_scale" else scale.t().contiguous().t()


def after(
    plan: LaunchPlan,
    launched: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    dim: int,
    bias: Tensor | None,
    norm: Normed | None = None,
) -> None:
    """Fill the caller's outputs from those of the launch."""
    out, addends = launched["out"], [bias] if bias is not None and plan.bias == "after" else []
    if plan.norm is not None and plan.norm.step == "after":
        assert norm is not None
        if norm.residual is not None:
            addends.append(as_rows(norm.residual, dim))
        new = as_rows(given["residual_out"], dim)
        add_and_normalise(out, addends, norm.weight, norm.eps, out, new)
    else:
        for addend in addends:
            out.add_(addend)
    for name in ("out", "gathered"):
        if name in plan.copies and name in given:
            outer = given[name].movedim(dim, 0)
            outer.copy_(launched[name].view(outer.shape))


def product(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Compute out = a @ b + bias by a library; with any strides, float32 sums, rounded once."""
    wide = torch.promote_types(a.dtype, torch.float32)
    direct = a.dtype == out.dtype and (out.dtype != torch.float16 or a.device.type != "cpu")
    if not direct:
        whole = torch.mm(a.to(wide), b.to(wide))
        out.copy_(whole if bias is None else whole.add_(bias))
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def _repacked(plan: LaunchPlan, b: Tensor) -> Tensor:
    return b.t().contiguous().t() if plan.b_layout == "column" else b.contiguous()
