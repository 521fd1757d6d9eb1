"""The steps of a GEMM op on its own rank around a launch, as the plan says: operands become matrices
of rows that the backend takes, results become what the caller asked for.

    a [.., K] ──(copy a)──▶ rows ─▶┐          ┌─▶ rows ──(+ bias)──(copy out)──▶ out [.., N]
    b [K, N] ──(copy b)──────────▶ │  launch  │
    a_scale, b_scale ──(copy)────▶ │          │
    bias [N] ──(copy bias)───────▶ │ (+ bias) │
    residual [.., N] ──▶ rows ───▶ │ (+ norm) │─▶ rows ──(+ residual, norm)──▶ residual_out [.., N]
                                   └──────────┴─▶ rows ──(copy gathered)──▶ gathered [.., K]

A norm comes behind a bias; where the launch does not normalise, neither adds it the residual. Rows that
are wanted in e4m3 are quantised by the launch that normalises, or at last.

Rows are counted with the dimension that ranks share outermost, so that those of a rank follow each
other. What is allocated lies so too: where that dimension is not the first, the result is a view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mkernel.backends.contracts.invariant_product import invariant_product
from mkernel.backends.contracts.norm import add_and_normalise
from mkernel.backends.contracts.scaled import quantised_rows
from mkernel.errors import ArgumentError, DtypeError, ShapeError
from mkernel.ops import validate
from mkernel.ops.steps import Steps
from mkernel.plan.arguments import Norm, Strides, rows_of, scale_sizes
from mkernel.plan.model import BLOCK, LaunchPlan, ScaleMode, Scales


class Scaled(NamedTuple):
    """The scales of a call's operands. ``use_fast_accum``: as :class:`mkernel.plan.model.Scales`."""

    a: Tensor
    b: Tensor
    use_fast_accum: bool


def scaled(a_scale: Tensor | None, b_scale: Tensor | None, use_fast_accum: bool) -> Scaled | None:
    """Pair the scales of a call; None: it has none. ArgumentError: one without the other."""
    if a_scale is None and b_scale is None:
        if use_fast_accum:
            raise ArgumentError("use_fast_accum", True, "False, without a_scale and b_scale")
        return None
    if a_scale is None or b_scale is None:
        missing, given = ("a_scale", "b_scale") if a_scale is None else ("b_scale", "a_scale")
        raise ArgumentError(missing, None, f"the scales of {missing[0]}, beside {given}")
    return Scaled(a_scale, b_scale, bool(use_fast_accum))


def check_scaled(a: Tensor, b: Tensor, given: Scaled, device: str) -> Scales:
    """Check a call's operands and scales, and return its scaling, whose mode follows from the shapes
    of the scales, each [.., its columns] beside a [.., K]. DtypeError, ShapeError, ArgumentError."""
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype != torch.float8_e4m3fn:
            raise DtypeError(f"{name}.dtype", operand.dtype, "torch.float8_e4m3fn, beside scales")
    for name, scale in (("a_scale", given.a), ("b_scale", given.b)):
        check_scale(name, scale, device)
    return Scales(mode=_mode(a, b, given), use_fast_accum=given.use_fast_accum)


def check_scale(name: str, scale: object, device: str) -> None:
    """Raise DtypeError or ArgumentError for scales that are not float32 and on the device."""
    if not isinstance(scale, Tensor):
        raise DtypeError(name, validate.describe(scale), "a torch.Tensor")
    if scale.dtype != torch.float32:
        raise DtypeError(f"{name}.dtype", scale.dtype, "torch.float32")
    validate.on_device(name, scale, device)


def _mode(a: Tensor, b: Tensor, given: Scaled) -> ScaleMode:
    (k, n), lead = b.shape, a.shape[:-1]
    if given.a.numel() == 1 and given.b.numel() == 1:
        return "tensor"
    modes: tuple[ScaleMode, ...] = ("row", "block")
    shapes = {mode: scale_sizes(mode, 1, n, k) for mode in modes}
    for mode, ((_, columns), of_b) in shapes.items():
        blocks = mode == "row" or k % BLOCK == 0
        if blocks and given.a.shape == (*lead, columns) and given.b.shape == of_b:
            return mode
    rows = ", ".join(map(str, lead))
    legal = "; or ".join(
        f"[{rows}, {columns}] and {list(of_b)} ({mode})"
        for mode, ((_, columns), of_b) in shapes.items()
    )
    found = f"{list(given.a.shape)} and {list(given.b.shape)}"
    raise ShapeError(
        "a_scale, b_scale",
        found,
        f"of a {list(a.shape)} and b {list(b.shape)}: one element each (tensor); or {legal}, "
        f"with K a multiple of {BLOCK}",
    )


def scale_strides(given: Scaled, dim: int) -> dict[str, Strides]:
    """Return whether scales are packed in memory: those of A by rows, ``dim`` outermost, those of B by
    columns, as B."""
    of_a = given.a.numel() == 1 or given.a.movedim(dim, 0).is_contiguous()
    of_b = given.b.numel() == 1 or given.b.t().is_contiguous()
    return {
        "a_scale": "packed" if of_a else "scattered",
        "b_scale": "packed" if of_b else "scattered",
    }


def refuse_gradients(op: str, where: str = "for e4m3 operands", /, **tensors: object) -> None:
    """Raise ArgumentError for a tensor whose gradient would be lost: such calls have no backward.

    Args:
        where: the calls, in words.
    """
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise ArgumentError(
                name,
                "a tensor that requires grad",
                f"a tensor without gradient: call under torch.no_grad(), or pass {name}.detach()",
                why=f"{op} has no backward {where}",
            )


def check_alike(a: Tensor, b: Sequence[Tensor], given: Sequence[Scaled], device: str) -> None:
    """Raise ArgumentError where products of one A have scales of several kinds."""
    modes = [check_scaled(a, *each, device).mode for each in zip(b, given, strict=True)]
    for at, mode in enumerate(modes):
        if mode != modes[0]:
            raise ArgumentError(
                f"b_scale[{at}]", f"scales by {mode}", f"by {modes[0]}, as b_scale[0]"
            )


def as_matrix(steps: Steps, scale: Tensor) -> Tensor:
    """Return the scale in two dimensions, whatever the shape of a single one is."""
    if scale.dim() == 2 or scale.numel() != 1:
        return scale
    made: Tensor = steps.do(Tensor.view, scale, (1, 1))
    return made


def scale_of_rows(gathered: Tensor, rows: int) -> Tensor:
    """Return one scale a gathered row, where a rank may have had one for all of its own."""
    return gathered.repeat_interleave(rows // len(gathered), 0)


EPS = 1e-6
"""The eps of a norm, where the caller names none."""


class Normed(NamedTuple):
    """The weight and eps of a norm, and the residual that is added to the rows before it. Packed.
    ``quantises``: normalised rows are wanted in e4m3."""

    residual: Tensor | None
    weight: Tensor
    eps: float
    quantises: bool = False

    @property
    def given(self) -> dict[str, Tensor]:
        """Return the tensors by their names in a launch."""
        there = {} if self.residual is None else {"residual": self.residual}
        return there | {"norm_weight": self.weight}

    @property
    def planned(self) -> Norm:
        """Return the norm as a plan is made of it."""
        return Norm(self.residual is not None, self.eps, self.quantises)

    def outputs(self, steps: Steps, out: Tensor) -> dict[str, Tensor]:
        """Allocate what there is beside normalised rows like ``out``: ``residual_out``, and where
        rows are quantised ``quantised`` and ``quantised_scale``."""
        found = {"residual_out": steps.empty(tuple(out.shape), out, out.dtype)}
        if self.quantises:
            found["quantised"] = steps.empty(tuple(out.shape), out, torch.float8_e4m3fn)
            scales = (*out.shape[:-1], 1)
            found["quantised_scale"] = steps.empty(scales, out, torch.float32)
        return found


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


def as_rows(x: Tensor, dim: int, steps: Steps | None = None) -> Tensor:
    """Reshape [.., K] to [rows, K], ``dim`` outermost; a view where ``x`` lies so, else a copy."""
    if x.dim() == 2 and dim == 0:
        return x
    rows = x.movedim(dim, 0).flatten(0, -2)
    if steps is None:
        return rows
    made: Tensor
    if rows.data_ptr() == x.data_ptr():
        made = steps.do(torch.as_strided, x, tuple(rows.shape), rows.stride())
    else:
        made = steps.do(Tensor.flatten, steps.do(Tensor.movedim, x, dim, 0), 0, -2)
    return made


def shaped(rows: Tensor, lead: Sequence[int], dim: int) -> Tensor:
    """Return what is packed with ``dim`` outermost as the view [.., N] whose rows it holds. Where one
    sequence is all of a batch, the view has the strides of a contiguous tensor: torch's compiler
    compares those of dimensions of one element too, and would copy.

    Args:
        lead: the sizes of the other dimensions, ``dim`` first.
    """
    before, after = lead[1 : dim + 1], lead[dim + 1 :]
    if all(isinstance(size, int) and size == 1 for size in before):
        return rows.view(*before, lead[0], *after, rows.shape[-1])
    return rows.view(*lead, rows.shape[-1]).movedim(0, dim)


def turned(x: Tensor, dim: int) -> Tensor:
    """Return [.., K] whose rows follow each other, ``dim`` outermost: ``x`` where it lies so, else one
    copy for all that read it, which torch's compiler joins with what computes ``x``."""
    outermost = x.movedim(dim, 0)
    if rows_of(outermost.shape, outermost.stride(), 1) != "scattered":
        return x
    return outermost.contiguous().movedim(0, dim)


def from_rows(steps: Steps, rows: Tensor, lead: Sequence[int], dim: int) -> Tensor:
    """Return a packed matrix as :func:`shaped` does."""
    if len(lead) == 1:
        return rows
    view = shaped(rows, lead, dim)
    made: Tensor = steps.do(torch.as_strided, rows, tuple(view.shape), view.stride())
    return made


def before(
    steps: Steps, plan: LaunchPlan, given: Mapping[str, Tensor], dim: int
) -> dict[str, Tensor]:
    """Prepare the tensors of the launch: ``given`` as matrices; copied, or new ones, where the plan
    says so."""
    launched = {}
    for name, tensor in given.items():
        if name == "b":
            launched[name] = _repacked(steps, plan, tensor) if "b" in plan.copies else tensor
        elif name in ("bias", "norm_weight"):
            launched[name] = steps.do(Tensor.contiguous, tensor) if name in plan.copies else tensor
        elif name == "gathered_scale":  # rows, whatever the dimension of A
            launched[name] = tensor
        elif name in ("a_scale", "b_scale") and tensor.numel() == 1:
            launched[name] = as_matrix(steps, tensor)
        elif name == "b_scale":
            launched[name] = _by_columns(steps, tensor) if name in plan.copies else tensor
        elif name == "a_scale" and name in plan.copies:
            launched[name] = steps.do(Tensor.contiguous, as_rows(tensor, dim, steps))
        elif name not in plan.copies:
            launched[name] = as_rows(tensor, dim, steps)
        elif name == "a":
            packed = steps.do(Tensor.contiguous, steps.do(Tensor.movedim, tensor, dim, 0))
            launched[name] = steps.do(Tensor.view, packed, (-1, tensor.shape[-1]))
        else:
            shape = (tensor.numel() // tensor.shape[-1], tensor.shape[-1])
            launched[name] = steps.empty(shape, tensor, tensor.dtype)
    return launched


def after(
    steps: Steps,
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
        residual = None if norm.residual is None else as_rows(norm.residual, dim, steps)
        new = as_rows(given["residual_out"], dim, steps)
        promised = plan.invariant is not None
        steps.do(normalised, out, *addends, residual, norm.weight, norm.eps, new, promised)
    else:
        for addend in addends:
            steps.do(Tensor.add_, out, addend)
    for name in ("out", "gathered"):
        if name in plan.copies and name in given:
            outer = steps.do(Tensor.movedim, given[name], dim, 0)
            steps.do(Tensor.copy_, outer, steps.do(Tensor.view, launched[name], outer.shape))


def of_norm(plan: LaunchPlan) -> tuple[str, ...]:
    """Return the outputs that a launch which normalises has beside ``out``."""
    if plan.norm is None or plan.norm.step != "launch":
        return ()
    more = ("quantised", "quantised_scale") if plan.norm.quantises else ()
    return "residual_out", *more


def quantise(steps: Steps, plan: LaunchPlan, outputs: Mapping[str, Tensor]) -> None:
    """Quantise a call's normalised rows where they are wanted in e4m3, and the launch does not."""
    if "quantised" in outputs and "quantised" not in of_norm(plan):
        steps.do(_quantised, outputs["out"], outputs["quantised"], outputs["quantised_scale"])


def _quantised(rows: Tensor, into: Tensor, scales: Tensor) -> None:
    found, scale = quantised_rows(rows)
    into.copy_(found)
    scales.copy_(scale)


def normalised(out: Tensor, *rest: Any) -> None:
    """Add the bias, where there is one, and the residual to ``out``, and normalise it in its place."""
    *addends, residual, weight, eps, new, invariant = rest
    addends = [each for each in (*addends, residual) if each is not None]
    add_and_normalise(out, addends, weight, eps, out, new, invariant=invariant)


def product(
    steps: Steps, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, invariant: bool
) -> None:
    """Compute out = a @ b + bias by a library; with any strides, float32 sums, rounded once; or as an
    invariant sum of one segment."""
    if invariant:
        steps.do(invariant_product, a, b, bias, out, 1, "float32")
        return
    wide = torch.promote_types(a.dtype, torch.float32)
    direct = a.dtype == out.dtype and (out.dtype != torch.float16 or a.device.type != "cpu")
    if not direct:
        whole = steps.do(torch.mm, steps.do(Tensor.to, a, wide), steps.do(Tensor.to, b, wide))
        if bias is not None:
            steps.do(Tensor.add_, whole, bias)
        steps.do(Tensor.copy_, out, whole)
    elif bias is None:
        steps.do(torch.mm, a, b, out=out)
    else:
        steps.do(torch.addmm, bias, a, b, out=out)


def _repacked(steps: Steps, plan: LaunchPlan, b: Tensor) -> Tensor:
    if plan.b_layout == "column":
        return _by_columns(steps, b)
    made: Tensor = steps.do(Tensor.contiguous, b)
    return made


def _by_columns(steps: Steps, matrix: Tensor) -> Tensor:
    """Return a copy whose columns are packed."""
    packed = steps.do(Tensor.contiguous, steps.do(Tensor.t, matrix))
    made: Tensor = steps.do(Tensor.t, packed)
    return made
