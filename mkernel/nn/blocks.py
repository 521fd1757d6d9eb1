"""Tensor-parallel blocks of a transformer: a gated MLP, and attention with grouped heads.

Each block is a column-parallel product for several layers at once, a part that acts on single
features or heads, and a row-parallel product. Activations are [batch, sequence, hidden]. Each block
loads its rank's state dict, and also that of the unsharded block whose layers are
``torch.nn.Linear`` under the names that transformers' Llama gives them; each rank then takes its
own part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention, silu

from mkernel.errors import ArgumentError
from mkernel.nn.linear import MergedColumnParallelLinear, RowParallelLinear
from mkernel.plan.invariance import Wanted
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current

SEQUENCE_DIM = 1


class _Block(Module):
    """A block with a merged layer, whose parameters a state dict may hold as single layers'
    parameters."""

    _merged: str  # the name of the layer that is one product of several

    def scratch_inputs(self, lead: tuple[int, ...], sizes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return zeros that the block can be called with, as its first layer does."""
        layer: MergedColumnParallelLinear = getattr(self, self._merged)
        return layer.scratch_inputs(lead, sizes)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        layer: MergedColumnParallelLinear = getattr(self, self._merged)
        errors: list[str] = arguments[-1]
        for kind, _ in layer.named_parameters():
            single = {name: f"{prefix}{name}.{kind}" for name in layer.layers}
            if not all(key in state_dict for key in single.values()):
                continue
            given = {name: state_dict.pop(key) for name, key in single.items()}
            found = layer.merged(given)
            if found is None:
                sizes = ", ".join(f"{single[n]} {[*each.shape]}" for n, each in given.items())
                errors.append(f"size mismatch: {sizes} for {layer.layers} features")
            else:
                state_dict[f"{prefix}{self._merged}.{kind}"] = found
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class ParallelMLP(_Block):
    """A gated MLP: down_proj(activation(gate_proj(x)) * up_proj(x)). gate_proj and up_proj are one
    product.

    Input and output: [batch, sequence, hidden]; this rank's part of the sequence with
    ``sequence_parallel``, otherwise all of it, the same on every rank.
    """

    _merged = "gate_up_proj"

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] = silu,
        sequence_parallel: bool = True,
        save_gathered: bool = True,
        invariant: Wanted = None,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make this rank's part of the block.

        Args:
            save_gathered, invariant: as :class:`ColumnParallelLinear` takes them.

        Raises:
            ArgumentError: ranks cannot share ``intermediate_size`` features. NotInitialized."""
        super().__init__()
        options = _options(sequence_parallel, save_gathered, invariant, group, device, dtype)
        features = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, features, bias, **options)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, **options)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block. Raises ShapeError and the other errors of
        :func:`mkernel.all_gather_gemm`."""
        gate, up = self.gate_up_proj(x)
        y: Tensor = self.down_proj(self.activation(gate) * up)
        return y


class ParallelAttention(_Block):
    """An attention block: o_proj(attention(q_proj(x), k_proj(x), v_proj(x))). A rank has heads / W
    of the heads, with all the keys and values that they need. q_proj, k_proj and v_proj are one
    product.

    Input and output are those of :class:`ParallelMLP`.
    """

    _merged = "qkv_proj"

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        out_bias: bool | None = None,
        sequence_parallel: bool = True,
        save_gathered: bool = True,
        invariant: Wanted = None,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make this rank's part of the block.

        Args:
            heads: heads of queries; a multiple of ``kv_heads``, which W divides.
            kv_heads: heads of keys and values; default: ``heads``.
            head_dim: features of a head; default: hidden_size / heads.
            bias: True if q_proj, k_proj and v_proj have a bias.
            out_bias: True if o_proj has one; default: ``bias``.
            save_gathered, invariant: as :class:`ColumnParallelLinear` takes them.

        Raises:
            ArgumentError: heads that cannot be grouped, or that ranks cannot share. NotInitialized.
        """
        super().__init__()
        kv_heads = kv_heads or heads
        ranks = current(group).size
        if heads % kv_heads:
            raise ArgumentError("heads", heads, f"a multiple of kv_heads = {kv_heads}")
        if kv_heads % ranks:
            raise ArgumentError("kv_heads", kv_heads, f"a multiple of the group's {ranks} ranks")
        if head_dim is None and hidden_size % heads:
            raise ArgumentError("hidden_size", hidden_size, f"a multiple of heads = {heads}")
        self.head_dim = head_dim or hidden_size // heads
        options = _options(sequence_parallel, save_gathered, invariant, group, device, dtype)
        queries, keys = heads * self.head_dim, kv_heads * self.head_dim
        features = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.qkv_proj = MergedColumnParallelLinear(hidden_size, features, bias, **options)
        out_bias = bias if out_bias is None else out_bias
        self.o_proj = RowParallelLinear(queries, hidden_size, out_bias, **options)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None, *, is_causal: bool = True
    ) -> Tensor:
        """Apply the block.

        Args:
            rotary: cosines and sines [sequence, head_dim] (or with a leading batch dimension), for
                the whole sequence, by which queries and keys are rotated; the two halves of a
                head's features are the pairs.
            is_causal: True if a position attends to no later one.

        Raises:
            ShapeError and the other errors of :func:`mkernel.all_gather_gemm`.
        """
        q, k, v = (
            each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in self.qkv_proj(x)
        )
        if rotary is not None:
            q, k = _rotated(q, *rotary), _rotated(k, *rotary)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        y: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return y


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cosines.unsqueeze(-3) + turned * sines.unsqueeze(-3)


def _options(
    sequence_parallel: bool,
    save_gathered: bool,
    invariant: Wanted,
    group: Group,
    device: Any,
    dtype: Any,
) -> dict[str, Any]:
    return {
        "sequence_parallel": sequence_parallel,
        "save_gathered": save_gathered,
        "invariant": invariant,
        "sequence_dim": SEQUENCE_DIM,
        "group": group,
        "device": device,
        "dtype": dtype,
    }
