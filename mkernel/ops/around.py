"""What a GEMM op does on its own rank around a launch, as the plan says: operands become matrices of
rows that the backend takes, results become what the caller asked for.

    a [.., K] ──(copy a)──▶ rows ─▶┐          ┌─▶ rows ──(+ bias)──(copy out)──▶ out [.., N]
    b [K, N] ──(copy b)──────────▶ │  launch  │
    bias [N] ──(copy bias)───────▶ │ (+ bias) │
                                   └──────────┴─▶ rows ──(copy gathered)──▶ gathered [.., K]

Rows are counted with the dimension that ranks share outermost, so that those of a rank follow each
other. What is allocated lies so too: where that dimension is not the first, the result is a view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mkernel.plan.model import LaunchPlan


def as_rows(x: Tensor, dim: int) -> Tensor:
    """[.., K] as a matrix [rows, K], ``dim`` outermost; a view where ``x`` lies so, else a copy."""
    return x if x.dim() == 2 and dim == 0 else x.movedim(dim, 0).flatten(0, -2)


def from_rows(rows: Tensor, lead: Sequence[int], dim: int) -> Tensor:
    """A packed matrix [rows, N] as the view [.., N] whose rows it holds.

    Args:
        lead: the sizes of the other dimensions, ``dim`` first.
    """
    if len(lead) == 1:
        return rows
    return rows.view(*lead, rows.shape[-1]).movedim(0, dim)


def before(plan: LaunchPlan, given: Mapping[str, Tensor], dim: int) -> dict[str, Tensor]:
    """The tensors of the launch: ``given`` as matrices; copied, or new ones, where the plan says so."""
    launched = {}
    for name, tensor in given.items():
        if name == "b":
            launched[name] = _repacked(plan, tensor) if "b" in plan.copies else tensor
        elif name == "bias":
            launched[name] = tensor.contiguous() if "bias" in plan.copies else tensor
        elif name not in plan.copies:
            launched[name] = as_rows(tensor, dim)
        elif name == "a":
            packed = tensor.movedim(dim, 0).contiguous()
            launched[name] = packed.view(-1, tensor.shape[-1])
        else:
            rows = tensor.numel() // tensor.shape[-1]
            launched[name] = tensor.new_empty((rows, tensor.shape[-1]))
    return launched


def after(
    plan: LaunchPlan,
    launched: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    dim: int,
    bias: Tensor | None,
) -> None:
    """Fill the caller's outputs from those of the launch."""
    if plan.bias == "after":
        assert bias is not None
        launched["out"].add_(bias)
    for name in ("out", "gathered"):
        if name in plan.copies and name in given:
            outer = given[name].movedim(dim, 0)
            outer.copy_(launched[name].view(outer.shape))


def product(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = a @ b + bias by a library; matrices with any strides, float32 sums, rounded once."""
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
