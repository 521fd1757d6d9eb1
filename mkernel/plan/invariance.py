"""Invariant results: the bits of an output row depend on that row, the weights and the dtypes alone,
not on other rows, their number or order, on the path, the chunks or the ranks.

Ops that sum over ranks cut K of all ranks into ``segments`` of one size, whatever the number of ranks:

    leaf i       the product of segment i, K * i / segments to K * (i + 1) / segments, in float32,
                 rounded to the partial dtype
    node         the float32 sum of two neighbours of the level below, 2 i and 2 i + 1, rounded to the
                 partial dtype
    root         rounded to the dtype of the result; a bias, a residual and a norm come after it

Rank r of W has segments r * segments / W to (r + 1) * segments / W. These are a whole subtree, and its
root is what the rank sends. AllGather+GEMM has one segment, which is rounded once; the leaves of
AllReduce are what ranks give. ``backends/contracts/tree.py`` adds tensors so.

Experts form ``segments`` contiguous groups by their numbers (:func:`group_of`), whatever the number of
ranks. A leaf of a combine is the weighted sum of a token's results from one group, in the order of its
slots, in float32, rounded to the partial dtype; GEMM+combine rounds the results to it too. Groups
without a result are +0. A dispatch adds nothing over experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args

from mkernel.errors import ArgumentError

PartialName = Literal["float16", "bfloat16", "float32"]
_PARTIALS: tuple[PartialName, ...] = get_args(PartialName)
MOST_SEGMENTS = 1024
STEP = 16
"""Segments of K are multiples of so many elements, the depth of a matrix unit's instruction; with
scales by blocks, of a block."""


@dataclass(frozen=True)
class Invariant:
    """The sum over K whose bits a call promises (:mod:`mkernel.plan.invariance`).

    Attributes:
        segments: parts into which K of all ranks is cut, a power of two that the number of ranks
            divides. The same number gives the same bits for every number of ranks.
        partial_dtype: dtype to which each node of the tree is rounded: ``float16``, ``bfloat16`` or
            ``float32``. None: that of the result.

    Raises:
        ArgumentError: another value.
    """

    segments: int = 8
    partial_dtype: PartialName | None = None

    def __post_init__(self) -> None:
        """Check both fields; a dtype of torch's becomes its name."""
        count = self.segments
        whole = isinstance(count, int) and not isinstance(count, bool)
        if not whole or not 1 <= count <= MOST_SEGMENTS or count & (count - 1):
            raise ArgumentError("segments", count, f"a power of two, 1 to {MOST_SEGMENTS}")
        if self.partial_dtype is not None:
            name = str(self.partial_dtype).removeprefix("torch.")
            if name not in _PARTIALS:
                raise ArgumentError(
                    "partial_dtype", name, f"None or one of: {', '.join(_PARTIALS)}"
                )
            object.__setattr__(self, "partial_dtype", name)

    def partial_of(self, out_dtype: str) -> PartialName:
        """Return the dtype to which nodes of a sum are rounded whose result has that dtype."""
        if self.partial_dtype is None and out_dtype in ("float16", "bfloat16"):
            return out_dtype  # type: ignore[return-value]
        return self.partial_dtype or "float32"


Wanted = bool | Invariant | None
"""The argument ``invariant`` of ops, layers and worlds. None: as the world says; True: with the
settings' segments."""


def encoded(wanted: Wanted) -> str | None:
    """Return the argument as registered ops take it. ArgumentError."""
    if wanted is None:
        return None
    if isinstance(wanted, Invariant):
        return f"{wanted.segments} {wanted.partial_dtype or ''}"
    if wanted is True or wanted is False:
        return "on" if wanted else "off"
    raise ArgumentError("invariant", wanted, "True, False, None or a mkernel.Invariant")


class InvarianceSettings(Protocol):
    """The settings that say what ops promise whose callers leave it open."""

    @property
    def invariant(self) -> bool:
        """Return whether they promise invariant results."""

    @property
    def invariant_segments(self) -> int:
        """Return the number of segments."""

    @property
    def invariant_partial_dtype(self) -> PartialName | None:
        """Return the partial dtype; None: that of results."""


def resolved(text: str | None, settings: InvarianceSettings) -> Invariant | None:
    """Return the sum that a call promises, by its argument as registered ops take it and the settings
    of its world; None: it promises none. ArgumentError."""
    if text == "off" or (text is None and not settings.invariant):
        return None
    if text in (None, "on"):
        return Invariant(settings.invariant_segments, settings.invariant_partial_dtype)
    count, _, name = text.partition(" ")
    if not count.isdecimal() or name not in ("", *_PARTIALS):
        raise ArgumentError(
            "invariant", repr(text), "'on', 'off' or '<segments> <dtype or nothing>'"
        )
    return Invariant(int(count), cast("PartialName | None", name or None))


def segments_of(segments: int, k: int) -> tuple[tuple[int, int], ...]:
    """Return [start, end) of each segment of a K that they cut evenly."""
    each = k // segments
    return tuple((each * at, each * (at + 1)) for at in range(segments))


def group_of(expert: Any, experts: int, segments: int) -> Any:
    """Return the group of an expert, or of a tensor of them. Ranks that share experts and segments
    evenly have whole groups, or one among several."""
    return expert * segments // experts


def pairs(count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return which of the nodes of each level, the leaves first, are added up: neighbours. ``count``,
    of the leaves, is a power of two."""
    found = []
    while count > 1:
        found.append(tuple((at, at + 1) for at in range(0, count, 2)))
        count //= 2
    return tuple(found)
