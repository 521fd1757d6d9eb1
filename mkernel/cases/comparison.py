"""The comparison of a result with its float64 reference: the one judge of jobs, benchmarks and the kit.

In this order:

1. The shapes are equal.
2. No element is poison (:mod:`mkernel.cases.poison`): every one was written.
3. Where the reference is NaN the result is NaN; where it is infinite the result is that infinity.
   Where it is finite the result is, with one exception: beyond the largest finite number of the
   result's dtype a right rounding overflows, so infinity of the reference's sign is right there too.
4. The relative Frobenius error over the elements that are finite in both; over none it is infinite,
   because a comparison of nothing says nothing. A result of no elements at all (experts to which no
   token goes) is right where its shape is; who sums up all ranks sees whether anything was compared.

Limits of errors are of norms of many elements, whose roundings differ. Of few, all may be rounded by
nearly half a step; an error of so much is right there, whatever the limit.

A large result of a product is compared as a whole without its whole reference: both are multiplied by a
few columns of random numbers (Freivalds). The norm of a row's difference is that of the row's error, in
the mean, and a row that is wrong is off in all of them (:func:`compare_projected`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from mkernel.cases import poison

FEW = 256
"""Elements, whose roundings' norm says little."""
ROW_SHARE = 3.0
"""A single row may be off by so many times the limit, because few numbers show its error. Of right
rows, off by the limit itself, less than one in 10^11 seems farther off; of rows with other data one in
10^12 seems nearer."""
_STRIP = 1 << 24
"""Elements that are widened at a time: 128 MiB."""


@dataclass(frozen=True)
class Comparison:
    """The distance of a result from its reference.

    Attributes:
        error: relative Frobenius error; infinite where ``why`` says what is wrong beyond it.
        elements: how many the error is taken over.
        why: why there is no finite error, in words that follow the output's name; else empty.
        rounding: what one rounding of few elements is off by at most; 0: they are many, or exact.
    """

    error: float
    elements: int
    why: str = ""
    rounding: float = field(default=0.0, compare=False)

    def limit(self, tolerance: float) -> float:
        """Return the largest error that counts as right: of many elements the tolerance, of few at
        least one rounding."""
        return max(tolerance, self.rounding)

    def within(self, tolerance: float) -> bool:
        """Return whether the error counts as right (a NaN error does not)."""
        return self.error <= self.limit(tolerance)

    def __add__(self, other: Comparison) -> Comparison:
        """Add up two calls: the worse one's error and words, and the elements of both."""
        worse = max(self, other, key=lambda each: badness(each.error))
        return Comparison(worse.error, self.elements + other.elements, worse.why, worse.rounding)


def badness(error: float) -> tuple[bool, float]:
    """Return a key that orders errors; nothing is worse than NaN."""
    return math.isnan(error), error


def compare(result: torch.Tensor, reference: torch.Tensor) -> Comparison:
    """Compare a floating-point result with its reference in float64 on the same device."""
    total = result.numel()
    if result.shape != reference.shape:
        return _wrong(f"has shape {tuple(result.shape)}, not {tuple(reference.shape)}")
    if not total:
        return Comparison(0.0, 0)
    unwritten = poison.count(result)
    if unwritten:
        return _wrong(f"has {unwritten} of {total} elements that were never written")
    wide = result.to(torch.float64)
    rounding = torch.finfo(result.dtype).eps / 2 if total <= FEW else 0.0
    finite = torch.isfinite(reference)
    both = finite & torch.isfinite(wide)
    if bool(both.all()):
        return Comparison(_relative(wide - reference, reference), total, rounding=rounding)
    beyond = reference.abs() > torch.finfo(result.dtype).max
    overflowed = finite & beyond & torch.isinf(wide) & (wide.sign() == reference.sign())
    alike = (wide == reference) | (torch.isnan(wide) & torch.isnan(reference))
    why = _mismatch(torch.where(finite, both | overflowed, alike), wide, reference)
    if why:
        return _wrong(why)
    error = _relative((wide - reference)[both], reference[both])
    return Comparison(error, int(both.sum()), rounding=rounding)


def compare_rows(
    result: torch.Tensor,
    reference: torch.Tensor,
    rows: Callable[[int], torch.Tensor | slice],
    axis: int,
) -> Comparison:
    """Compare some rows of a result, counted along ``axis``, with their reference. The rows that are
    not compared must be finite at least."""
    if result.dim() != reference.dim():
        return _wrong(f"has {result.dim()} dimensions, not {reference.dim()}")
    at = rows(result.shape[axis])
    if isinstance(at, slice):
        return compare(result, reference)
    narrow = result.element_size() == 1  # of which torch cannot say what is finite, nor select any
    if not bool(torch.isfinite(result.float() if narrow else result).all()):
        return _wrong("has elements that are not finite")
    if narrow:
        bits = result.view(torch.int8).index_select(axis, at)
        return compare(bits.view(result.dtype), reference)
    return compare(result.index_select(axis, at), reference)


def narrowed(matrix: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """Return a matrix in float64; times columns where there are some, and then only a strip of it is
    widened at a time."""
    if columns is None:
        return matrix.double()
    step = max(1, _STRIP // max(1, matrix.shape[1]))
    strips = torch.split(matrix, step)
    return torch.cat([strip.to(torch.float64) @ columns for strip in strips])


def compare_projected(
    result: torch.Tensor,
    reference: torch.Tensor,
    columns: torch.Tensor,
    row_share: float = ROW_SHARE,
) -> Comparison:
    """Compare all rows of a result with their float64 reference times ``columns`` [N, few], which are
    normally distributed.

    The error is the relative Frobenius error as these show it, or the worst row's over ``row_share``
    where that is more. Elements must be finite.
    """
    shape = (len(reference), len(columns))
    if result.shape != shape:
        return _wrong(f"has shape {tuple(result.shape)}, not {shape}")
    gaps, sizes = [], []
    for rows in range(0, len(result), step := max(1, _STRIP // shape[1])):
        wide = result[rows : rows + step].to(torch.float64)
        gaps.append((wide @ columns - reference[rows : rows + step]).square().mean(1))
        sizes.append(wide.square().sum(1))
    gap, size = torch.cat(gaps), torch.cat(sizes)
    if not bool(torch.isfinite(gap).all()):
        unwritten = poison.count(result)
        if unwritten:
            return _wrong(f"has {unwritten} of {result.numel()} elements that were never written")
        return _wrong("has elements that are not finite")
    least = reference.square().mean(1).sum()
    return Comparison(_worst(gap, size, least, row_share), result.numel())


def compare_alike(result: torch.Tensor, other: torch.Tensor) -> Comparison:
    """Compare two results of the same inputs, which differ by at most twice what either may be off. The
    error is half of theirs, or of the worst row's over :data:`ROW_SHARE` where that is more."""
    if result.shape != other.shape:
        return _wrong(f"has shape {tuple(result.shape)}, and {tuple(other.shape)} in another call")
    if not result.numel():
        return Comparison(0.0, 0)
    one, two = (each.to(torch.float64).flatten(end_dim=-2) for each in (result, other))
    same = (one == two) | (one.isnan() & two.isnan())
    gap = torch.where(same, 0.0, one - two).square().sum(1)
    if not bool(torch.isfinite(gap).all()):
        return _wrong("has elements that are finite in one call and not in another")
    size = torch.where(torch.isfinite(two), two, 0.0).square().sum(1)
    return Comparison(_worst(gap, size, size.sum(), ROW_SHARE) / 2, result.numel())


def _worst(gap: torch.Tensor, size: torch.Tensor, least: torch.Tensor, row_share: float) -> float:
    """Return the relative error of all rows, or the worst one's over ``row_share``, given the squared
    norms of their differences and of themselves; all together are as large as ``least``."""
    total = float(torch.maximum(size.sum(), least))
    if not total:
        return math.sqrt(float(gap.sum()))
    floor = total / len(size) * 1e-6  # of a row that cancels, as a share of the others
    row = float((gap / size.clamp(min=floor)).max())
    return max(math.sqrt(float(gap.sum()) / total), math.sqrt(row) / row_share)


def _relative(gap: torch.Tensor, reference: torch.Tensor) -> float:
    off = float(torch.linalg.vector_norm(gap))
    norm = float(torch.linalg.vector_norm(reference))
    return off / norm if norm else off


def compare_exact(result: torch.Tensor, reference: torch.Tensor) -> Comparison:
    """Compare a result that must equal its reference, which is cast to the result's dtype."""
    if result.shape != reference.shape:
        return _wrong(f"has shape {tuple(result.shape)}, not {tuple(reference.shape)}")
    differing = int((result != reference.to(result.dtype)).sum())
    if differing:
        return _wrong(f"is not equal to the reference in {differing} of {result.numel()} elements")
    return Comparison(0.0, result.numel())


def _wrong(why: str) -> Comparison:
    return Comparison(math.inf, 0, why)


def _mismatch(right: torch.Tensor, wide: torch.Tensor, reference: torch.Tensor) -> str:
    """Say which elements are not ``right``, or that none is left to be compared; else nothing."""
    total, finite = wide.numel(), torch.isfinite(reference)
    odd = int((~right).sum())
    if not odd:
        if bool((finite & torch.isfinite(wide)).any()):
            return ""
        return (
            f"has nothing that could be compared: none of {total} elements is finite in the "
            "float64 reference and in the result; look for NaN and infinity in the inputs"
        )
    nan = int((torch.isnan(wide) & ~torch.isnan(reference)).sum())
    if nan:
        return f"has {nan} of {total} elements that are NaN where the reference is not"
    infinite = int((torch.isinf(wide) & finite & ~right).sum())
    if infinite:
        return f"has {infinite} of {total} elements that are infinite where the reference is finite"
    return f"has {odd} of {total} elements that are not the NaN or infinity of the reference"
