"""Attention over a sequence that is split over the ranks of a group, as a layer."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from mkernel.ops.ring_attention import ring_attention
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current


class RingAttention(Module):
    """:func:`mkernel.ring_attention` of tensors [batch, sequence, heads, width], as layers have them.

    Queries, keys and values come in and go out as parts of the sequence, S/W positions on each rank of
    the group. All that acts on single positions needs no change, but rotary embeddings and losses must
    be those of the positions that a rank holds (:func:`mkernel.zigzag_positions`).
    """

    def __init__(
        self, *, causal: bool = False, scale: float | None = None, group: Group = None
    ) -> None:
        """Args:
            causal: position i attends to positions up to i, and ranks hold the positions of the zigzag
                split; else rank r holds [r·S/W, (r+1)·S/W).
            scale: of the scores; default D^-0.5.
            group: names the world; None: the default one.

        Raises:
            Unsupported: the world's accelerators have no attention. NotInitialized.
        """
        super().__init__()
        world = current(group)
        self.causal, self.scale, self.group = causal, scale, world.name
        self._takes_positions = "positions" in (
            world.engine("ring_attention").claims.attention_layouts
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Args:
            q: [B, S/W, Hq, D]. k, v: [B, S/W, Hkv, D]; Hkv divides Hq. What is not contiguous is
                copied; also what is, on accelerators that take [B, H, S/W, D] alone.
            cu_seqlens: of packed documents, as :func:`mkernel.ring_attention` takes them.

        Returns:
            [B, S/W, Hq, D], in q's dtype.

        Raises:
            What :func:`mkernel.ring_attention` raises.
        """
        turned = [each.contiguous().transpose(1, 2) for each in (q, k, v)]
        if not self._takes_positions:
            turned = [each.contiguous() for each in turned]
        out = ring_attention(
            *turned,
            causal=self.causal,
            scale=self.scale,
            cu_seqlens=cu_seqlens,
            group=self.group,
        )
        return out.transpose(1, 2)

    def extra_repr(self) -> str:
        """The options that results depend on."""
        scale = "" if self.scale is None else f", scale={self.scale}"
        return f"causal={self.causal}{scale}"
