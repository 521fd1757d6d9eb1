"""The experts of a mixture-of-experts layer, split over the ranks of a group.

The router stays outside: it is the same on every rank, and its choices for this rank's tokens are
an input. Two ops send tokens to the ranks of their experts and bring results back; the activation
lies between them. The layer combines with data parallelism, in which ranks have tokens of their
own. Gradients of replicated parameters must then be added over the ranks; those of the experts
already are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, SiLU
from torch.nn.functional import pad, silu

from mkernel.errors import ArgumentError, DtypeError, ShapeError
from mkernel.nn.block_scaled import SCALE, joined, padded, quantised
from mkernel.nn.sharded import ShardedModule
from mkernel.ops import autocast
from mkernel.ops.around import refuse_gradients
from mkernel.ops.moe import MoeDispatch, MoeQuantisedDispatch, moe_dispatch_gemm
from mkernel.ops.moe_gemm_combine import moe_gemm_combine
from mkernel.ops.plan_file import spread_ids
from mkernel.plan.invariance import Wanted, encoded, resolved
from mkernel.plan.model import BLOCK, Activation
from mkernel.world.groups import Group
from mkernel.world.lifecycle import current

_SILU = "SiLUActivation"
"""The name of transformers' module of SiLU, which is no ``torch.nn.SiLU`` (5.24)."""
_WEIGHTS = ("gate_up_proj", "down_proj")
_E4M3 = torch.float8_e4m3fn
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OTHER_GATES = ("alpha", "limit", "swiglu_alpha", "swiglu_limit", "gate_softcap", "up_softcap")
"""Attributes of transformers' experts that compute more than activation(gate) * up."""


class ExpertParallelMLP(ShardedModule):
    """The gated MLPs of E experts, of which each rank has E/W.

    out[t] = sum over slots of topk_weights[t, slot] · mlp(x[t]) of expert topk_ids[t, slot], with
    mlp(x) = (activation(gate) * up) @ down_proj[e] and [gate, up] = x @ gate_up_proj[e].

    Two calls communicate: :func:`mkernel.moe_dispatch_gemm`, which also applies the activation if
    it is SiLU and no gradients are needed, and :func:`mkernel.moe_gemm_combine`. With invariant results
    it applies SiLU also where gradients are needed, so that training has the bits of inference.
    The layer replaces the module ``experts`` of transformers' MoE layers
    (``layer.mlp.experts = ExpertParallelMLP.from_experts(layer.mlp.experts, transposed=True)``).

    Attributes:
        gate_up_proj: [E/W, H, 2I], parameter; the first half of the columns is the gate's.
        down_proj: [E/W, I, H], parameter. With ``transposed`` both are stored as ``torch.nn.Linear``
            stores weights, [E/W, 2I, H] and [E/W, H, I].
        gate_up_proj_scale_inv: [E/W, 2I / 128, H / 128] float32, parameter, only of e4m3 weights; a
            block of 128 x 128 weights is multiplied by its entry.
        down_proj_scale_inv: [E/W, H / 128, I / 128], the same of ``down_proj``.

    A state dict of all experts is loaded as well as one of this rank's: each rank takes its own
    part. Gradients of both parameters are sums over all ranks' losses. Names of single experts, as
    files of checkpoints have them (``0.gate_proj.weight``), are taken in place of the joined ones.

    With ``dtype=torch.float8_e4m3fn`` the layer is for inference: weights are e4m3, and so is what
    travels to them. It loads a checkpoint in e4m3 with ``weight_scale_inv``, or one in 16 or 32 bits,
    which is quantised once, as it is loaded. Scales are NaN until then. Gate and up have blocks of
    their own: where I is not a multiple of 128, the parameters have zeros up to the next one, after
    the gate's rows and after those of up.
    """

    gate_up_proj: Parameter
    gate_up_proj_scale_inv: Parameter
    down_proj: Parameter
    down_proj_scale_inv: Parameter

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
        invariant: Wanted = None,
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
            invariant: as :func:`mkernel.moe_gemm_combine` takes it. Another activation than SiLU is
                torch's, and as invariant as that is.
            group: the group whose world is used; None: the default one.
            device, dtype: device and dtype of the parameters. ``torch.float8_e4m3fn``: with scales,
                for ``transposed`` weights and H that is a multiple of 128.

        Raises:
            ArgumentError: ranks cannot share the experts, or these cannot be e4m3. NotInitialized.
        """
        super().__init__()
        world = current(group)
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_experts, self.transposed = num_experts, transposed
        self.activation = activation
        self.max_tokens, self.capacity = max_tokens, capacity
        self.invariant = invariant
        encoded(invariant)  # or ArgumentError
        self.group = world.name
        self._rank, self._ranks = world.rank, world.size
        if num_experts % world.size:
            legal = f"a multiple of the group's {world.size} ranks"
            raise ArgumentError("num_experts", num_experts, legal)
        self._quantised = dtype == _E4M3
        if self._quantised and not transposed:
            raise ArgumentError("transposed", transposed, "True, with e4m3 weights")
        if self._quantised and hidden_size % BLOCK:
            legal = f"a multiple of {BLOCK}, with e4m3 weights"
            raise ArgumentError("hidden_size", hidden_size, legal)
        own = num_experts // world.size
        inner = intermediate_size + (-intermediate_size % BLOCK if self._quantised else 0)
        up, down = (hidden_size, 2 * inner), (inner, hidden_size)
        for name, sizes in zip(_WEIGHTS, (up, down), strict=True):
            stored = sizes[::-1] if transposed else sizes
            empty = torch.empty((own, *stored), device=device, dtype=dtype)
            self.register_parameter(name, Parameter(empty, requires_grad=not self._quantised))
            if self._quantised:
                blocks = [own, *(size // BLOCK for size in stored)]
                empty = torch.empty(blocks, device=device, dtype=torch.float32)
                self.register_parameter(name + SCALE, Parameter(empty, requires_grad=False))
        self.reset_parameters()

    @classmethod
    def from_experts(
        cls,
        experts: Module,
        *,
        transposed: bool,
        max_tokens: int | None = None,
        capacity: int | None = None,
        invariant: Wanted = None,
        group: Group = None,
        dtype: torch.dtype | None = None,
    ) -> ExpertParallelMLP:
        """Make this rank's part of experts that every rank has whole.

        Args:
            experts: a module with parameters ``gate_up_proj`` [E, H, 2I] and ``down_proj`` [E, I,
                H] (``transposed``: [E, 2I, H] and [E, H, I], as in transformers' Qwen3-MoE), and
                optionally its activation ``act_fn``; default: SiLU. e4m3 parameters have scales
                ``gate_up_proj_scale_inv`` and ``down_proj_scale_inv``, as in transformers'
                ``FP8Experts``.
            dtype: of the parameters; default: that of the experts. ``torch.float8_e4m3fn`` quantises
                those in 16 or 32 bits.

        Raises:
            ShapeError: weights of other sizes.
            ArgumentError: the experts compute something else of gate and up.
        """
        other = [name for name in _OTHER_GATES if getattr(experts, name, None) is not None]
        if other:
            given = f"{type(experts).__name__} with {', '.join(other)}"
            raise ArgumentError("experts", given, "experts of activation(gate) * up")
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
            invariant=invariant,
            group=group,
            device=down.device,
            dtype=dtype or down.dtype,
        )
        names = [*_WEIGHTS, *(name + SCALE for name in _WEIGHTS if down.dtype == _E4M3)]
        made.load_state_dict({name: getattr(experts, name).detach() for name in names})
        return made

    def reset_parameters(self) -> None:
        """Initialise each expert as ``torch.nn.Linear`` does; each rank draws from its own
        generator. Scales of e4m3 weights become NaN, so that weights must be loaded."""
        if self._quantised:
            for name in _WEIGHTS:
                torch.nn.init.constant_(getattr(self, name + SCALE), math.nan)
            return
        for name, inputs in (
            ("gate_up_proj", self.hidden_size),
            ("down_proj", self.intermediate_size),
        ):
            bound = 1 / math.sqrt(inputs)
            torch.nn.init.uniform_(getattr(self, name), -bound, bound)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Apply each token's experts and add their weighted results.

        Args:
            x: [..., H], this rank's tokens; with e4m3 weights in 16 bits.
            topk_ids: [..., k] int32 or int64, the experts of each token, 0 to E - 1; -1: none.
            topk_weights: [..., k], floating point.

        Returns:
            [..., H], shaped as ``x``, in its dtype; where autocast is on, in autocast's.

        Raises:
            ShapeError: more tokens than ``max_tokens``; and the other errors of
                :func:`mkernel.moe_dispatch_gemm` and :func:`mkernel.moe_gemm_combine`.
            ArgumentError: a gradient is needed, and weights are e4m3.
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
        if autocast.enabled():
            tokens = autocast.cast(tokens)
        if self.transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        fused: Activation | None = "silu_and_mul" if self._fuses(tokens, up) else None
        of_up: dict[str, Any] = {}
        of_down: dict[str, Any] = {}
        if self._quantised:
            inputs = {"x": x, "topk_weights": topk_weights}
            refuse_gradients("ExpertParallelMLP", "with e4m3 weights", **inputs)
            of_up["w_scale"] = self.gate_up_proj_scale_inv.transpose(1, 2)
            of_up["quantise"] = fused and "block"
            of_down["w2_scale"] = self.down_proj_scale_inv.transpose(1, 2)
            of_down["out_dtype"] = tokens.dtype
        sent: MoeDispatch | MoeQuantisedDispatch = moe_dispatch_gemm(
            tokens.contiguous(),
            ids.contiguous(),
            up,
            capacity=self.capacity,
            activation=fused,
            invariant=self.invariant,
            group=self.group,
            **of_up,
        )
        h = sent.outputs
        if isinstance(sent, MoeQuantisedDispatch):
            of_down["h_scale"] = sent.scales
        if fused is None:
            gate, inner = h.chunk(2, dim=-1)
            h = (self.activation(gate) * inner).contiguous()
        options = {"invariant": self.invariant, "group": self.group, **of_down}
        out = moe_gemm_combine(h, down, sent.handle, weights, **options)
        return out[:count].view(x.shape)

    def scratch_inputs(self, lead: tuple[int, ...], sizes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Return zeros as tokens, evenly spread experts and weights, for :func:`mkernel.warm`.

        Args:
            lead: sizes of the tokens but the last, on this rank.
            sizes: ``top_k``, the number of a token's experts. ArgumentError without it.
        """
        if "top_k" not in sizes:
            raise ArgumentError("top_k", None, "the number of a token's experts, beside rows")
        up, _ = self._weights()
        dtype = torch.bfloat16 if self._quantised else up.dtype
        x = torch.zeros((*lead, self.hidden_size), dtype=dtype, device=up.device)
        ids = spread_ids((*lead, sizes["top_k"]), self.num_experts, self._rank).to(up.device)
        return x, ids, torch.ones(ids.shape, device=up.device)

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Return this rank's weights, as they are stored."""
        if autocast.enabled():
            up, down = autocast.cast([self.gate_up_proj, self.down_proj])
            return up, down
        return self.gate_up_proj, self.down_proj

    def _fuses(self, x: Tensor, up: Tensor) -> bool:
        """Return whether the first op applies the activation: it can, and no gradient will need
        gate and up, or results are invariant."""
        given = self.activation
        is_silu = given is silu or isinstance(given, SiLU) or type(given).__name__ == _SILU
        trains = torch.is_grad_enabled() and (x.requires_grad or up.requires_grad)
        if not is_silu or "silu_and_mul" not in _activations(self.group):
            return False
        return not trains or _promises(encoded(self.invariant), self.group)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        each = self.num_experts // self._ranks
        own = range(self._rank * each, (self._rank + 1) * each)
        found = joined(state_dict, prefix, own, self.num_experts, transposed=self.transposed)
        for name in _WEIGHTS if self._quantised else ():
            key, parameter = prefix + name, getattr(self, name)
            weight, scale = found.get(key), found.get(key + SCALE)
            if isinstance(scale, Tensor):
                found[key + SCALE] = scale.detach().float()  # checkpoints have others, as bfloat16
            if not isinstance(weight, Tensor) or weight.dtype == _E4M3:
                continue
            if scale is not None or weight.dtype not in _FLOATS:
                legal = f"{_E4M3} beside {name}{SCALE}; or 16 or 32 bits, without"
                raise DtypeError(f"{key}.dtype", weight.dtype, legal)
            part = self._part(name, weight.detach(), parameter)
            if part.shape == parameter.shape:
                found[key], found[key + SCALE] = quantised(part)
        super()._load_from_state_dict(found, prefix, *arguments)

    def _part(self, name: str, whole: Tensor, parameter: Parameter) -> Tensor:
        if whole.dim() != parameter.dim():
            return whole
        own = whole.chunk(self._ranks)[self._rank] if len(whole) == self.num_experts else whole
        if own.shape[1:] == parameter.shape[1:]:
            return own
        h, inner = self.hidden_size, self.intermediate_size
        unpadded = {"gate_up_proj": (2 * inner, h), "down_proj": (h, inner)}.get(name, ())
        if self._quantised and tuple(own.shape) == (len(parameter), *unpadded):
            return padded(name, own, inner)
        return whole

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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _promises(invariant: str | None, group: str) -> bool:
    """Return whether calls with that argument promise invariant results in a group's world."""
    return resolved(invariant, current(group).settings) is not None
