"""Products of matrices whose bits of a row depend on that row and on the right-hand matrix alone, from
a library that promises nothing of the kind.

A library may choose another kernel, and so another order of K, for other sizes. Here it is called in
blocks of one size for each device and K, whatever M and N are: rows and columns are filled up with
zeros. Operands are float32, to which those of 16 bits and of e4m3 times their scales are widened, so
every call is of one kind. What remains is that a row's bits do not depend on its place in a block, nor
on its neighbours. That is measured, once for each device and K, and refused where it does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from mkernel.backends.contracts.tree import tree_sum
from mkernel.errors import Unsupported
from mkernel.plan.invariance import segments_of

Multiply = Callable[[Tensor, Tensor], Tensor]
_BLOCKS = {"cpu": (64, 128)}
_OTHER_BLOCK = (128, 512)
"""Rows and columns of a block, by type of device."""
_ELEMENTS = 16384
"""Elements of a block of :func:`in_blocks`: a multiple of every vector, and fewer than torch shares
among threads (32768)."""


class InvariantFactor:
    """A right-hand matrix [K, N], prepared once for many invariant products."""

    def __init__(self, b: Tensor, segments: int = 1, partial_dtype: str = "float32") -> None:
        """Prepare the matrix, of any strides.

        Args:
            segments: leaves of the tree that K is cut into, evenly.
            partial_dtype: of the tree's nodes.
        """
        self._columns, self._partial = b.shape[1], getattr(torch, partial_dtype)
        self._rows, width = block_of(b.device)
        self._segments = segments_of(segments, len(b))
        blocks = -(-b.shape[1] // width)
        whole = b.new_zeros((len(b), blocks * width), dtype=torch.float32)
        whole[:, : self._columns] = b
        # Packed, so that all blocks of all calls lie alike: [segment, block of columns, K, width].
        self._b = whole.view(segments, -1, blocks, width).transpose(1, 2).contiguous()

    def product(self, a: Tensor, out: Tensor) -> None:
        """Compute out [M, N] = a [M, K] @ b; roots are rounded to out's dtype. There may be no rows."""
        for start in range(0, len(a), self._rows):
            rows = a[start : start + self._rows]
            leaves = [
                self._leaf(rows[:, first:end], blocks)
                for (first, end), blocks in zip(self._segments, self._b, strict=True)
            ]
            out[start : start + self._rows] = tree_sum(leaves)

    def _leaf(self, rows: Tensor, blocks: Tensor) -> Tensor:
        """Return the product of a segment, rounded to the partial dtype."""
        block = rows.new_zeros((self._rows, rows.shape[1]), dtype=torch.float32)
        block[: len(rows)] = rows
        found = torch.cat([torch.mm(block, each) for each in blocks], 1)
        return found[: len(rows), : self._columns].to(self._partial)


def invariant_product(
    a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, segments: int, partial_dtype: str
) -> None:
    """Compute out = a @ b, which is rounded, plus bias, which is rounded again. Unsupported: as
    :func:`check_products`."""
    check_products(a.device, a.shape[1] // segments)
    InvariantFactor(b, segments, partial_dtype).product(a, out)
    if bias is not None:
        out.add_(bias)


def in_blocks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function so that an element's bits do not depend on its place: a CPU's
    vectors and the elements that they leave over have functions of their own. So every call is on as
    many elements, which no vector or thread divides unevenly."""
    filled = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % _ELEMENTS))
    found = torch.cat([function(each) for each in torch.split(filled, _ELEMENTS)])
    return found[: x.numel()].view(x.shape)


def block_of(device: torch.device) -> tuple[int, int]:
    """Return rows and columns of a block on such a device."""
    return _BLOCKS.get(device.type, _OTHER_BLOCK)


def check_products(device: torch.device, k: int) -> None:
    """Raise Unsupported unless the library's product of blocks with that K, of a segment, was measured
    to give a row the same bits in every place and beside any neighbours. The first call of a kind
    measures, on the device's current stream, and waits for it."""
    how = (torch.get_float32_matmul_precision(), torch.get_num_threads())
    found = _measured(device, k, *how)
    if found is not None:
        rows, columns = block_of(device)
        raise Unsupported(
            f"torch's product of [{rows}, {k}] @ [{k}, {columns}] in float32 on {device} gives a row "
            f"other bits {found} (precision {how[0]!r}, {how[1]} threads), so segments of {k} have "
            f"no invariant results; pass invariant=False, or choose other segments"
        )


@lru_cache(maxsize=1024)
def _measured(device: torch.device, k: int, precision: str, threads: int) -> str | None:
    return first_difference(torch.mm, device, k)


def first_difference(multiply: Multiply, device: torch.device, k: int) -> str | None:
    """Return where a product of blocks depends on more than a row and a column, in words; None: it does
    not. Operands cancel, mix magnitudes and are subnormal in part, so that another order of K is
    another result."""
    rows, columns = block_of(device)
    random = torch.Generator().manual_seed(k)
    a = adversarial(rows, k, random, negated=True).to(device)
    b = adversarial(columns, k, random, negated=False).to(device)
    whole = multiply(a, b.t().contiguous())
    same = multiply(a[:1].expand(rows, -1).contiguous(), b[:1].t().expand(-1, columns).contiguous())
    if other_bits(same, whole[:1, :1].expand(rows, columns)):
        return "in another place"
    for turned in (1, rows // 2 - 1, rows - 3):
        found = multiply(a.roll(turned, 0), b.roll(turned, 0).t().contiguous())
        if other_bits(found, whole.roll((turned, turned), (0, 1))):
            return "in another place beside others"
    for number in (0.0, torch.inf, torch.nan):
        other, some = torch.full_like(a, number), range(0, rows, 7)
        other[::7] = a[::7]
        if other_bits(multiply(other, b.t().contiguous())[::7], whole[::7]):
            return f"in a block of {len(some)} rows and others of {number}"
    return None


def other_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors in float32 differ in a bit."""
    one, other = (each.contiguous().view(torch.int32) for each in (one, other))
    return not torch.equal(one, other)


def adversarial(rows: int, k: int, random: torch.Generator, *, negated: bool) -> Tensor:
    """Return [rows, K] in float32 whose products with another such matrix have sums that depend on
    their order, if one of both is ``negated``: neighbours nearly cancel, magnitudes differ by up to
    2^24, and one element in eleven is subnormal."""
    made = torch.randn((rows, k), generator=random)
    made *= torch.exp2(torch.randint(-6, 7, (1, k), generator=random).float())
    even = made[:, : k - k % 2 : 2]
    made[:, 1::2] = (
        even * (torch.rand(even.shape, generator=random) * 2.0**-8 - 1) if negated else even
    )
    made[:, ::11] *= 2.0**-140
    return made
