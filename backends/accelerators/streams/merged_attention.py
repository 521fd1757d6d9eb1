"""Merging of attention results on parts of the keys into the result on all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from mkernel.backends.accelerators.streams.torch_attention import Seen


class MergedAttention:
    """The result of some queries over the keys seen so far, in float32 (float64 for float64
    tensors).

    The state is the maximum m, sum l and weighted values o of the parts so far. A part with the
    result r, which has the weight e^n · s, and m' = max(m, n) change them to l·e^(m-m') +
    s·e^(n-m') and o·e^(m-m') + s·e^(n-m')·r. Parts are merged in the order in which they come, so
    equal calls give equal bits.
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        """Start with no keys seen. :meth:`finish` fills ``out`` [B, Hq, R, D], of any dtype, and
        ``lse`` [B, Hq, R], whose dtype is that of the sums."""
        self._result, self._lse = out, lse
        in_place = out.dtype == lse.dtype
        self._out = out.zero_() if in_place else torch.zeros_like(out, dtype=lse.dtype)
        self._top = torch.full_like(lse, float("-inf"))
        self._sum = torch.zeros_like(lse)

    def add(self, rows: slice, seen: Seen) -> None:
        """Merge what the queries of these rows found in keys that they had not seen."""
        out, top, total = (each[:, :, rows] for each in (self._out, self._top, self._sum))
        higher = torch.maximum(top, seen.top)
        # If all scores are -inf there is no maximum to subtract: -inf - -inf is NaN.
        base = higher.masked_fill(higher == float("-inf"), 0.0)
        kept, new = (top - base).exp_(), (seen.top - base).exp_()
        if seen.sum is not None:
            new.mul_(seen.sum)
        out.mul_(kept[..., None]).addcmul_(seen.out.to(out.dtype), new[..., None])
        total.mul_(kept).add_(new)
        top.copy_(higher)

    def finish(self) -> None:
        """Round the result, once, and write it to its place, with the log-sum-exp."""
        torch.div(self._out, self._sum[..., None], out=self._out)
        if self._result is not self._out:
            self._result.copy_(self._out)
        torch.add(self._top, self._sum.log(), out=self._lse)
