"""Results of few elements, judged one by one by the most that their declared roundings make.

Tolerances are of norms: of few elements all may be rounded by nearly half a step, as those of 2 in 400
draws of 16 in bfloat16 were, computed so on a CPU.
"""

from __future__ import annotations

import torch

from mkernel.cases.base import every_row
from mkernel.cases.comparison import FEW, compare
from mkernel.cases.gemm import GemmCase
from mkernel.cases.moe import MoeDispatchCase

EPS_OF_SUMS = torch.finfo(torch.float32).eps


def rounded_once(got: torch.Tensor, wanted: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether every element is the truth but for one rounding to its dtype. ``before``: how far what is
    rounded may be from the truth."""
    allowed = before + half_step(wanted.abs() + before, got.dtype)
    return bool(((got.double() - wanted).abs() <= allowed).all())


def half_step(sizes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the gap between numbers of a dtype just above these sizes, in float64."""
    kind = torch.finfo(dtype)
    exponent = sizes.clamp_min(kind.smallest_normal).frexp().exponent  # of twice the gap's binade
    return kind.eps / 4 * torch.ldexp(torch.ones_like(sizes), exponent)


def product_right(case: GemmCase, got: torch.Tensor, rank: int, world: int, turn: int) -> bool:
    """:func:`rounded_once` of a GEMM op's whole ``out``, without scales and norms.

    Each of the K products and W results of ranks is added in float32, in whatever order, off by at most
    eps of the sizes of all terms. What is added to results of other ranks or to a bias may have been
    rounded to the dtype of ``out`` (``rounded_partials``); alone it is rounded once, however often.
    """
    wanted = case.reference(rank, world, turn)["out"]
    ranks = [rank] if case.gemm.gathers else list(range(world))
    sizes = torch.zeros_like(wanted)
    for source in range(world):
        b_of = rank if case.gemm.gathers else source
        a, b = case.wide_a(source, world, turn).abs(), case.wide_b(b_of, world, turn).abs()
        rows = wanted.shape[0]
        if case.gemm.gathers:
            sizes[source * len(a) : (source + 1) * len(a)] = a @ b
        else:
            sizes += (a[rank * rows : (rank + 1) * rows] if case.gemm.scatters else a) @ b
    bias = case.biased(torch.zeros_like(wanted), rank, turn).abs()
    before = (case.sizes["k"] + len(ranks)) * EPS_OF_SUMS * (sizes + bias)
    if not case.gemm.gathers and (world > 1 or bool(bias.any())):
        before += torch.finfo(got.dtype).eps / 2 * case.partials(rank, world, turn)["out"]
    return rounded_once(got, wanted, before)


def few_right(case: GemmCase, got: torch.Tensor, rank: int, world: int, turn: int) -> bool:
    """Whether a GEMM op's ``out`` that is beyond the tolerance of norms is of few elements, and right:
    :func:`product_right`; of e4m3 operands, which matrix units add with fewer bits than that allows,
    by norm no further off than one rounding."""
    if got.numel() > FEW:
        return False
    if case.options.get("scales") is None:
        return product_right(case, got, rank, world, turn)
    return compare(got, case.reference(rank, world, turn)["out"]).within(0.0)


def new_residual_right(case: GemmCase, got: torch.Tensor, rank: int, world: int, turn: int) -> bool:
    """:func:`rounded_once` of a ``residual_out`` of few elements: the sum, and each rank's part of it,
    may have been rounded before the residual was added."""
    if got.numel() > FEW:
        return False
    sizes = case.partials(rank, world, turn)["residual_out"]
    before = (case.sizes["k"] + world) * EPS_OF_SUMS * sizes
    before += torch.finfo(got.dtype).eps / 2 * sizes
    return rounded_once(got, case.reference(rank, world, turn)["residual_out"], before)


def experts_right(
    case: MoeDispatchCase, name: str, got: torch.Tensor, rank: int, world: int, turn: int
) -> bool:
    """:func:`rounded_once` of ``outputs`` or ``out`` of a dispatch and its combine."""
    wanted = case.reference(rank, world, turn)[name]
    if name == "out":
        near = case.near_ties(rank, world, turn)["out"]
        sent = case._rounded(case._activate(case._sent(rank, world, turn, every_row)))
        weights = case._weights(rank, turn).double().abs()
        sums = torch.einsum("tk,tki->ti", weights, sent.abs()) * weights.shape[1] * EPS_OF_SUMS
    else:
        near = torch.zeros_like(wanted)
        source, token, slot, _ = case._rows(rank, world, turn)
        products, sizes = (
            torch.stack(
                [case._sent(one, world, turn, every_row, sizes_only=only) for one in range(world)]
            )[source, token, slot]
            for only in (False, True)
        )
        sums = case._hidden() * EPS_OF_SUMS * sizes
        if case._activated:
            sums = case._activated_error(products, sums, EPS_OF_SUMS)
    return rounded_once(got, wanted, near + sums)
