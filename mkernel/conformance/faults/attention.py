"""Faults of ring attention: they correct results by what would have gone wrong with the keys of
their own rank, which a fault can see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mkernel.backends.contracts.accelerator import Call
from mkernel.conformance.faults.altering import Altered, Ended
from mkernel.plan.model import AttentionShape


class _Own(NamedTuple):
    """The results of a call in float64, and those of the keys of this rank alone: out [B, Hq, S/W,
    D] and lse [B, Hq, S/W]; their scores [B, Hq, S/W, S/W], and values v [B, Hq, S/W, D]."""

    out: Tensor
    lse: Tensor
    own_out: Tensor
    own_lse: Tensor
    scores: Tensor
    v: Tensor


def _own(ended: Ended) -> _Own | None:
    """Compute the results of the own keys. None if it is another op, or documents are packed."""
    shape, tensors = ended.call.plan.shape, ended.call.tensors
    if not isinstance(shape, AttentionShape) or shape.documents or "q" not in tensors:
        return None
    groups = shape.heads // shape.kv_heads
    q, k, v = (tensors[name].double() for name in "qkv")
    k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
    scores = q @ k.transpose(2, 3) * float(ended.call.options["scale"])
    seen = scores
    if shape.causal:
        seen = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), float("-inf"))
    out, lse = (ended.outputs[name].double() for name in ("out", "lse"))
    return _Own(out, lse, seen.softmax(3) @ v, seen.logsumexp(3), scores, v)


def _write(ended: Ended, out: Tensor, lse: Tensor) -> None:
    ended.outputs["out"].copy_(out)
    ended.outputs["lse"].copy_(lse)


def see_one_key_more_at_the_seam(ended: Ended) -> None:
    """Let the last query of a rank's first piece see the first key of its second."""
    found = _own(ended)
    half = ended.call.plan.shape.model_dump().get("sequence", 0) // ended.call.plan.world_size // 2
    if found is None or not ended.call.plan.shape.model_dump()["causal"]:
        return
    row = slice(half - 1, half)
    more = found.scores[:, :, row, half]
    lse = torch.logaddexp(found.lse[:, :, row], more)
    kept, new = ((each - lse).exp()[..., None] for each in (found.lse[:, :, row], more))
    found.out[:, :, row] = found.out[:, :, row] * kept + found.v[:, :, half : half + 1] * new
    found.lse[:, :, row] = lse
    _write(ended, found.out, found.lse)


def _merged(ended: Ended, weight: Callable[[_Own], Tensor]) -> None:
    """Merge the results of the own keys and of all others by another weight of the own ones, [B,
    Hq, S/W], between 0 and 1."""
    found = _own(ended)
    if found is None:
        return
    right = (found.own_lse - found.lse).exp().clamp(max=1.0)[..., None]
    others = (found.out - found.own_out * right) / (1 - right)
    wrong = weight(found)[..., None]
    out = found.own_out * wrong + others * (1 - wrong)
    alone = 1 - right < 1e-3  # there are no other keys, or none that count
    _write(ended, torch.where(alone, found.out, out), found.lse)


def merge_without_rescaling(ended: Ended) -> None:
    """Count the results of the own keys and of all others alike."""
    _merged(ended, lambda found: torch.full_like(found.lse, 0.5))


def merge_by_narrow_sums(ended: Ended) -> None:
    """Round both log-sum-exps to halves before they are compared."""

    def weight(found: _Own) -> Tensor:
        others = found.lse + torch.log1p(-(found.own_lse - found.lse).exp().clamp(max=1 - 1e-9))
        own, rest = (each.half().double() for each in (found.own_lse, others))
        return torch.sigmoid(own - rest)

    _merged(ended, weight)


def next_heads_sums(ended: Ended) -> None:
    """Give each head the log-sum-exp of the next one."""
    if "lse" in ended.outputs:
        ended.outputs["lse"].copy_(ended.outputs["lse"].roll(-1, 1))


def merge_by_rank(call: Call) -> Call:
    """Attend to the own keys first, and then to other ranks' as they come, as without a promise."""
    if not isinstance(call.plan.shape, AttentionShape):
        return call
    return replace(call, plan=call.plan.model_copy(update={"invariant": None}))


def boundaries_off_by_one(call: Call, bounds: Tensor) -> Tensor:
    """Begin all documents but the first one position late."""
    later = (bounds + 1).clamp(max=int(bounds[-1]))
    later[0] = 0
    return later


class StaleBlock(Altered):
    """Keys and values of rank 1 are, from a plan's second call on, those of the call before."""

    def change(self, call: Call) -> Call:
        if not isinstance(call.plan.shape, AttentionShape) or call.rank != 1:
            return call
        key = call.plan.digest()
        now = {name: call.tensors[name].clone() for name in "kv"}
        older, self.kept[key] = self.kept.get(key, now), now
        return replace(call, tensors={**call.tensors, **older})
