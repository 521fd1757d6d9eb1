"""Attention of some queries on some keys by our own kernel (kernels/attention_core.hpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from mkernel.backends.accelerators.hopper.attention_library import Seen
from mkernel.backends.accelerators.hopper.native import native


def attend(q: Tensor, k: Tensor, v: Tensor, first: int, causal: bool, scale: float) -> Seen:
    """As :func:`.attention_library.attend`, of heads of 128."""
    seeing = q[:, :, first:] if first else q
    batch, heads, queries, _ = seeing.shape
    out = torch.empty_like(seeing)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    counters = torch.zeros(2, dtype=torch.int32, device=q.device)
    core = native().Core(
        [(each.data_ptr(), each.stride()[:3]) for each in (seeing, k, v, out)],
        lse.data_ptr(),
        counters.data_ptr(),
        (batch, heads, k.shape[1], queries, k.shape[2]),
        scale,
        causal,
        q.dtype == torch.float16,
    )
    native().attend(q.device.index, core, torch.cuda.current_stream(q.device).cuda_stream)
    return Seen(out, lse, first)
