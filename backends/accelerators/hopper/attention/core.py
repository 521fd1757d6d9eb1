"""Attention of some queries on some keys by our own kernel (kernels/attention/core.hpp)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mkernel.backends.accelerators.cuda.attention.in_parts import AttentionExecutor
from mkernel.backends.accelerators.cuda.attention.library import Seen
from mkernel.backends.accelerators.cuda.attention.ring import Source
from mkernel.backends.accelerators.cuda.attention.tuning import attention_shape, check_crossing
from mkernel.backends.accelerators.cuda.native_kernels import native
from mkernel.backends.accelerators.cuda.schedule import AttentionSchedule
from mkernel.backends.accelerators.hopper.attention.tuning import core_takes
from mkernel.backends.contracts.accelerator import Call
from mkernel.plan.model import LaunchPlan

if TYPE_CHECKING:
    from mkernel.backends.accelerators.cuda import _kernels


class AttentionCoreExecutor(AttentionExecutor):
    """The executor of ring attention by parts, each of which our own kernel computes."""

    @staticmethod
    def checked(plan: LaunchPlan) -> AttentionSchedule:
        """Return the schedule. ArgumentError for one that a call would not follow."""
        if core_takes(attention_shape(plan)):
            how = plan.part(AttentionSchedule)
            check_crossing(plan, how)
            return how
        return AttentionExecutor.checked(plan)

    def _attend(self, call: Call, source: Source, q: Tensor, causal: bool, scale: float) -> Seen:
        # The own part may run at the same time as the others' parts, which follow one another.
        counters = counters_of(call.workspace, source.rank != call.rank)
        return attend(q, source.k, source.v, source.first, causal, scale, counters)


def attend(
    q: Tensor, k: Tensor, v: Tensor, first: int, causal: bool, scale: float, counters: int
) -> Seen:
    """Compute :func:`.attention.library.attend` for heads of 128. ``counters``: see :func:`core`."""
    seeing = q[:, :, first:] if first else q
    out = torch.empty_like(seeing)
    lse = torch.empty(seeing.shape[:3], dtype=torch.float32, device=q.device)
    asked = core(seeing, k, v, out, lse, causal, scale, counters)
    native().attend(q.device.index, asked, torch.cuda.current_stream(q.device).cuda_stream)
    return Seen(out, lse, first)


def core(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
    counters: int,
) -> _kernels.Core:  # fmt: skip
    """Describe attention of q [B, Hq, R, D] on k and v [B, Hkv, K, D] into ``out``, like q, and
    ``lse`` [B, Hq, R], packed.

    ``counters``: address of two words that every launch leaves zero, as it found them, also after a
    failed wait; launches that may run at the same time have their own (:func:`counters_of`)."""
    made: _kernels.Core = native().Core(
        [(each.data_ptr(), each.stride()[:3]) for each in (q, k, v, out)],
        lse.data_ptr(),
        counters,
        (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]),
        scale,
        causal,
        q.dtype == torch.float16,
    )
    return made


def counters_of(workspace: int, which: int = 0) -> int:
    """Return the counters in a workspace for the first or the second of two concurrent launches of
    its call."""
    made = native()
    at: int = workspace + made.COUNTERS_OFFSET + which * made.COUNTERS_BYTES
    return at
