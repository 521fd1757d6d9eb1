"""The experts of a mixture-of-experts layer, split over the ranks of a group.

The router stays outside: it is the same on every rank, and its choices for this rank's tokens are
an input. Two ops send tokens to the ranks of their experts and bring results back; the activation
lies between them. The layer combines with data parallelism, in which ranks have tokens of their
own. Gradients of replicated parameters must then be added over the ranks; those of the experts
already are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Module, Parameter, SiLU
from torch.nn.functional import pad, silu

from mkernel.errors import ArgumentError, ShapeError
from mkernel.nn.sharded import ShardedModule
from mkernel.ops.moe import moe_dispatch_gemm
from mkernel.ops.moe_gemm_combine import moe_gemm_combine
from mkernel.plan.model import Activation
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current

_SILU = "SiLUActivation"
"""The name of transformers' module of SiLU, which is no ``torch.nn.SiLU`` (5.24)."""


class ExpertParallelMLP(ShardedModule):
    """The gated MLPs of E experts, of which each rank has E/W.

    out[t] = sum over slots of topk_weights[t, slot] · mlp(x[t]) of expert topk_ids[t, slot], with
    mlp(x) = (activation(gate) * up) @ down_proj[e] and [gate, up] = x @ gate_up_proj[e].

    Two calls communicate: :func:`mkernel.moe_dispatch_gemm`, which also applies the activation if
    it is SiLU and no gradients are needed, and :func:`mkernel.moe_gemm_combine`.
    The layer replaces the module ``experts`` of transformers' MoE layers
    (``layer.mlp.experts = ExpertParallelMLP.from_experts(layer.mlp.experts, transposed=True)``).

    Attributes:
        gate_up_proj: [E/W, H, 2I], parameter; the first half of the columns is the gate's.
        down_proj: [E/W, I, H], parameter. With ``transposed`` both are stored as ``torch.nn.Linear``
            stores weights, [E/W, 2I, H] and [E/W, H, I].

    A state dict of all experts is loaded as well as one of this rank's: each rank takes its own
    part. Gradients of both parameters are sums over all ranks' losses.
    """

    gate_up_proj: Parameter
    down_proj: Parameter

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        transposed: bool = False,
        activation: Callable[[Tensor], Tensor] = silu,
        max_tokens: int | None = None,
        capacity: int | None = None,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make this rank's part of the experts.

        Args:
            hidden_size, intermediate_size: H and I.
            num_experts: E, the number of experts of all ranks together, a multiple of W.
            transposed: True if parameters are stored as ``torch.nn.Linear`` stores weights.
            max_tokens: the most tokens that a rank may have in one call. Ranks may then have
                different numbers of them, or none; each is padded to this number. None: all ranks
                have equally many.
            capacity: rows for all of a rank's experts, so that no shape depends on the routing, as
                in :func:`mkernel.moe_dispatch_gemm`.
            group: the group whose world is used; None: the default one.
            device, dtype: device and dtype of the parameters.

        Raises:
            ArgumentError: ranks cannot share the experts. NotInitialized.
        """
        super().__init__()
        world = current(group)
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_experts, self.transposed = num_experts, transposed
        self.activation = activation
        self.max_tokens, self.capacity = max_tokens, capacity
        self.group = world.name
        self._rank, self._ranks = world.rank, world.size
        if num_experts % world.size:
            legal = f"a multiple of the group's {world.size} ranks"
            raise ArgumentError("num_experts", num_experts, legal)
        own = num_experts // world.size
        up, down = (hidden_size, 2 * intermediate_size), (intermediate_size, hidden_size)
        for name, sizes in (("gate_up_proj", up), ("down_proj", down)):
            stored = sizes[::-1] if transposed else sizes
            empty = torch.empty((own, *stored), device=device, dtype=dtype)
            self.register_parameter(name, Parameter(empty))
        self.reset_parameters()

    @classmethod
    def from_experts(
        cls,
        experts: Module,
        *,
        transposed: bool,
        max_tokens: int | None = None,
        capacity: int | None = None,
        group: Group = None,
    ) -> ExpertParallelMLP:
        """Make this rank's part of experts that every rank has whole.

        Args:
            experts: a module with parameters ``gate_up_proj`` [E, H, 2I] and ``down_proj`` [E, I,
                H] (``transposed``: [E, 2I, H] and [E, H, I], as in transformers' Qwen3-MoE), and
                optionally its activation ``act_fn``; default: SiLU.

        Raises:
            ShapeError: weights of other sizes.
        """
        gate_up, down = experts.gate_up_proj, experts.down_proj
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        count, inner, hidden = down.shape
        if transposed:
            inner, hidden = hidden, inner
        legal = (count, 2 * inner, hidden) if transposed else (count, hidden, 2 * inner)
        if tuple(gate_up.shape) != legal:
            how = "as torch.nn.Linear stores weights" if transposed else "as they are multiplied"
            raise ShapeError(
                "experts.gate_up_proj",
                tuple(gate_up.shape),
                f"{legal}, with down_proj {tuple(down.shape)}, {how}",
            )
        made = cls(
            hidden,
            inner,
            count,
            transposed=transposed,
            activation=getattr(experts, "act_fn", silu),
            max_tokens=max_tokens,
            capacity=capacity,
            group=group,
            device=down.device,
            dtype=down.dtype,
        )
        made.load_state_dict({"gate_up_proj": gate_up.detach(), "down_proj": down.detach()})
        return made

    def reset_parameters(self) -> None:
        """Initialise each expert as ``torch.nn.Linear`` does; each rank draws from its own
        generator."""
        for name, inputs in (
            ("gate_up_proj", self.hidden_size),
            ("down_proj", self.intermediate_size),
        ):
            bound = 1 / math.sqrt(inputs)
            torch.nn.init.uniform_(getattr(self, name), -bound, bound)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Apply each token's experts and add their weighted results.

        Args:
            x: [..., H], this rank's tokens.
            topk_ids: [..., k] int32 or int64, the experts of each token, 0 to E - 1; -1: none.
            topk_weights: [..., k], floating point.

        Returns:
            [..., H], shaped as ``x``, in its dtype.

        Raises:
            ShapeError: more tokens than ``max_tokens``; and the other errors of
                :func:`mkernel.moe_dispatch_gemm` and :func:`mkernel.moe_gemm_combine`.
        """
        tokens, ids = x.reshape(-1, x.shape[-1]), topk_ids.reshape(-1, topk_ids.shape[-1])
        weights = topk_weights.reshape(-1, topk_weights.shape[-1])
        count = len(tokens)
        if self.max_tokens is not None:
            missing = self.max_tokens - count
            if missing < 0:
                raise ShapeError(
                    "x", tuple(x.shape), f"at most max_tokens = {self.max_tokens} tokens"
                )
            tokens, weights = pad(tokens, (0, 0, 0, missing)), pad(weights, (0, 0, 0, missing))
            ids = pad(ids, (0, 0, 0, missing), value=-1)
        up, down = self._weights()
        if self.transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        fused: Activation | None = "silu_and_mul" if self._fuses(tokens, up) else None
        sent = moe_dispatch_gemm(
            tokens.contiguous(),
            ids.contiguous(),
            up,
            capacity=self.capacity,
            activation=fused,
            group=self.group,
        )
        h = sent.outputs
        if fused is None:
            gate, inner = h.chunk(2, dim=-1)
            h = (self.activation(gate) * inner).contiguous()
        out = moe_gemm_combine(h, down, sent.handle, weights, group=self.group)
        return out[:count].view(x.shape)

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Return this rank's weights, as they are stored."""
        return self.gate_up_proj, self.down_proj

    def _fuses(self, x: Tensor, up: Tensor) -> bool:
        """Return whether the first op applies the activation: it can, and no gradient will need
        gate and up."""
        given = self.activation
        is_silu = given is silu or isinstance(given, SiLU) or type(given).__name__ == _SILU
        trains = torch.is_grad_enabled() and (x.requires_grad or up.requires_grad)
        return is_silu and not trains and "silu_and_mul" in _activations(self.group)

    def _part(self, name: str, whole: Tensor, parameter: Parameter) -> Tensor:
        expected = (self.num_experts, *parameter.shape[1:])
        return whole.chunk(self._ranks)[self._rank] if tuple(whole.shape) == expected else whole

    def extra_repr(self) -> str:
        """Return the sizes of the whole layer and the number of ranks that share it."""
        return (
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"num_experts={self.num_experts}, ranks={self._ranks}"
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _activations(group: str) -> tuple[Activation, ...]:
    """Return the activations that the first op applies in a group's world."""
    return current(group).engine("moe_dispatch_gemm").claims.activations
