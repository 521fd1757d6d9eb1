"""Weights of experts from checkpoints in transformers' layout: those of single experts are joined, and
quantised to e4m3 by blocks of 128 x 128."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mkernel.backends.contracts.scaled import quantised_rows
from mkernel.errors import ArgumentError
from mkernel.plan.model import BLOCK

SCALE = "_scale_inv"
"""The suffix by which transformers names a weight's scales, by which its values are multiplied."""
_SINGLE = re.compile(rf"(\d+)\.(gate|up|down)_proj\.weight({SCALE})?")
_JOINED = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


def joined(
    state_dict: Mapping[str, Any], prefix: str, own: range, experts: int, *, transposed: bool
) -> dict[str, Any]:
    """Return a state dict in which weights of single experts are joined, with their scales.

    Checkpoints' files have ``0.gate_proj.weight`` [I, H], ``0.up_proj.weight`` and
    ``0.down_proj.weight`` [H, I], and in e4m3 ``0.gate_proj.weight_scale_inv`` [I / 128, H / 128],
    rounded up. Their places take ``gate_up_proj`` and ``down_proj`` of the experts ``own``, with
    ``transposed`` as they are stored, and ``gate_up_proj_scale_inv`` and ``down_proj_scale_inv``.

    Raises:
        ArgumentError: one of these experts is not there, and others are.
    """
    found: dict[str, Any] = {}
    single: dict[tuple[int, str, str], Tensor] = {}
    for key, value in state_dict.items():
        match = _SINGLE.fullmatch(key, len(prefix)) if key.startswith(prefix) else None
        if match and int(match[1]) < experts:
            single[int(match[1]), match[2], match[3] or ""] = value
        else:
            found[key] = value
    for name, parts in _JOINED.items():
        for suffix in ("", SCALE):
            every = [[(expert, part, suffix) for part in parts] for expert in own]
            missing = [key for keys in every for key in keys if key not in single]
            if len(missing) == len(own) * len(parts):
                continue
            if missing:
                expert, part, _ = missing[0]
                absent = f"without {prefix}{expert}.{part}_proj.weight{suffix}"
                raise ArgumentError("state_dict", absent, "all of this rank's experts, or none")
            whole = torch.stack([torch.cat([single[key] for key in keys]) for keys in every])
            found[prefix + name + suffix] = whole if transposed else whole.transpose(1, 2)
    return found


def padded(name: str, weight: Tensor, inner: int) -> Tensor:
    """Append zeros so that I is a multiple of 128: to the gate's rows and to those of up, or to the
    columns of down. ``weight``: [E, 2I, H] or [E, H, I]; ``inner``: I."""
    more = -inner % BLOCK
    if name == "down_proj":
        return pad(weight, (0, more))
    halves = weight.reshape(len(weight), 2, inner, weight.shape[2])
    return pad(halves, (0, 0, 0, more)).flatten(1, 2)


def quantised(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weights [E, N, K] to e4m3 by blocks of 128 x 128, of which N and K are multiples, and
    return them with their scales [E, N / 128, K / 128] in float32. It takes one expert at a time, so
    that wide copies are those of one."""
    _, n, k = weights.shape
    sizes = (n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    values = torch.empty(weights.shape, dtype=torch.float8_e4m3fn, device=weights.device)
    scales = values.new_empty((len(weights), sizes[0], sizes[2]), dtype=torch.float32)
    for weight, into, into_scale in zip(weights, values, scales, strict=True):
        rows, scale = quantised_rows(weight.reshape(sizes).transpose(1, 2).flatten(2))
        blocks = rows.view(sizes[0], sizes[2], BLOCK, BLOCK)
        into.view(sizes).copy_(blocks.transpose(1, 2))
        into_scale.copy_(scale.squeeze(2))
    return values, scales
