"""Attention over a sequence that is split over the ranks of a group, as a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from mkernel.errors import ArgumentError, ShapeError
from mkernel.ops.ring_attention import ring_attention
from mkernel.plan.invariance import Wanted, encoded
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current


class RingAttention(Module):
    """:func:`mkernel.ring_attention` of tensors [batch, sequence, heads, width], as layers have them.

    Queries, keys, values and results are parts of the sequence, S/W positions on each rank of the
    group. Layers that act on single positions need no change, but rotary embeddings and losses must
    use the positions that the rank holds (:func:`mkernel.zigzag_positions`).
    """

    def __init__(
        self,
        *,
        causal: bool = False,
        scale: float | None = None,
        invariant: Wanted = None,
        group: Group = None,
    ) -> None:
        """Make the layer, which has no parameters.

        Args:
            causal: position i attends to positions up to i, and ranks hold the positions of the
                zigzag split; else rank r holds [r·S/W, (r+1)·S/W).
            scale: factor of the scores; default D^-0.5.
            invariant: as :func:`mkernel.ring_attention` takes it.
            group: the group whose world is used; None: the default one.

        Raises:
            Unsupported: the world's accelerators have no attention. NotInitialized.
        """
        super().__init__()
        world = current(group)
        self.causal, self.scale, self.group = causal, scale, world.name
        self.invariant = invariant
        encoded(invariant)  # or ArgumentError
        self._takes_positions = "positions" in (
            world.engine("ring_attention").claims.attention_layouts
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Compute attention of this rank's positions to the whole sequence.

        Args:
            q: [B, S/W, Hq, D]. k, v: [B, S/W, Hkv, D]; Hkv divides Hq. Tensors that are not
                contiguous are copied; on accelerators that take only [B, H, S/W, D], all are.
            cu_seqlens: offsets of packed documents, as :func:`mkernel.ring_attention` takes them.

        Returns:
            [B, S/W, Hq, D], in q's dtype.

        Raises:
            The errors of :func:`mkernel.ring_attention`.
        """
        turned = [each.contiguous().transpose(1, 2) for each in (q, k, v)]
        if not self._takes_positions:
            turned = [each.contiguous() for each in turned]
        out = ring_attention(
            *turned,
            causal=self.causal,
            scale=self.scale,
            cu_seqlens=cu_seqlens,
            invariant=self.invariant,
            group=self.group,
        )
        return out.transpose(1, 2)

    def scratch_inputs(self, lead: tuple[int, ...], sizes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return zeros as q, k and v, for :func:`mkernel.warm`.

        Args:
            lead: batch and whole sequence.
            sizes: ``heads``, ``head_dim``, and ``kv_heads`` where it differs; ``dtype``, by default
                bfloat16. ArgumentError, ShapeError.
        """
        world = current(self.group)
        for name in ("heads", "head_dim"):
            if name not in sizes:
                raise ArgumentError(name, None, "a size of the attention, beside rows")
        if len(lead) != 2 or lead[1] % world.size:
            legal = f"(batch, sequence), which the group's {world.size} ranks can share"
            raise ShapeError("rows", lead, legal)
        heads, wide = sizes["heads"], sizes["head_dim"]
        q, k, v = (
            torch.zeros(
                (lead[0], lead[1] // world.size, count, wide),
                dtype=sizes.get("dtype", torch.bfloat16),
                device=world.accelerator.device,
            )
            for count in (heads, *(sizes.get("kv_heads", heads),) * 2)
        )
        return q, k, v

    def extra_repr(self) -> str:
        """Return the options that results depend on."""
        scale = "" if self.scale is None else f", scale={self.scale}"
        return f"causal={self.causal}{scale}"
