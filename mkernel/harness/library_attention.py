"""Attention over all ranks' keys by torch and torch.distributed alone: the library's attention on each
rank's part, whose results are merged in float32.

Where ``causal``, sequences are split in zigzag: of an earlier rank's keys all queries see the first
half, and of a later rank's the second half of the queries sees all. Scores are scaled by D^-0.5.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mkernel.harness.collectives import all_gather
from mkernel.harness.problem import Inputs, Problem, Tensors


class Part(NamedTuple):
    """What the queries from ``first`` on found in one rank's keys: ``out`` [B, H, R, D], ``lse``
    [B, H, R]."""

    out: torch.Tensor
    lse: torch.Tensor
    first: int


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Part:
    """torch's attention: on a CPU its own, elsewhere cuDNN's."""
    aten = torch.ops.aten
    if q.device.type != "cpu":
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False
        )
        return Part(out, lse.reshape(q.shape[:3]), 0)
    groups = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return Part(out, lse, 0)


def part(problem: Problem, q: torch.Tensor, kv: torch.Tensor, source: int) -> Part:
    """What this rank's queries find in ``kv`` [2, B, H, R, D], keys and values of rank ``source``."""
    causal, rank = bool(problem.case.sizes.get("causal")), problem.rank
    k, v = kv
    if not causal or source == rank:
        return attend(q, k, v, causal)
    half = q.shape[2] // 2
    if source < rank:
        return attend(q, k[:, :, :half], v[:, :, :half], causal=False)
    return attend(q[:, :, half:], k, v, causal=False)._replace(first=half)


def merged(parts: list[Part], dtype: torch.dtype) -> Tensors:
    """The parts' results as of one attention; the first part is of all queries."""
    out, lse = parts[0].out.float(), parts[0].lse.clone()
    for each in parts[1:]:
        rows = slice(each.first, None)
        both = torch.logaddexp(lse[:, :, rows], each.lse)
        kept, added = ((one - both).exp()[..., None] for one in (lse[:, :, rows], each.lse))
        out[:, :, rows] = out[:, :, rows] * kept + each.out.float() * added
        lse[:, :, rows] = both
    return {"out": out.to(dtype), "lse": lse}


def order(problem: Problem) -> list[int]:
    """Whose keys come when: this rank's first, then those of the ranks before it."""
    return [(problem.rank - step) % problem.world for step in range(problem.world)]


def own(inputs: Inputs) -> torch.Tensor:
    """This rank's keys and values, [2, B, H, R, D]."""
    return torch.stack((inputs["k"], inputs["v"]))


def gathered(problem: Problem, inputs: Inputs) -> torch.Tensor:
    """All ranks' keys and values, [W, 2, B, H, R, D]. Collective."""
    mine = own(inputs)
    whole = mine.new_empty(problem.world, *mine.shape)
    all_gather(whole.flatten(0, 1), mine)
    return whole


def call(problem: Problem, inputs: Inputs) -> Tensors:
    """All keys and values gathered, attention on the parts, and the merge."""
    kv = gathered(problem, inputs)
    parts = [part(problem, inputs["q"], kv[source], source) for source in order(problem)]
    return merged(parts, inputs["q"].dtype)


def alone(problem: Problem, inputs: Inputs) -> Tensors:
    """Attention on parts that are there, ``kv`` of all ranks; nothing is merged."""
    found: Tensors = {}
    for source in order(problem):
        each = part(problem, inputs["q"], inputs["kv"][source], source)
        found |= {f"out {source}": each.out, f"lse {source}": each.lse}
    return found


def merged_alone(problem: Problem, found: Tensors) -> Tensors:
    """What :func:`alone` found, merged."""
    half = 0
    parts = []
    for source in order(problem):
        out, lse = found[f"out {source}"], found[f"lse {source}"]
        half = half or out.shape[2] // 2
        parts.append(Part(out, lse, half if out.shape[2] == half else 0))
    return merged(parts, parts[0].out.dtype)
