"""The blocks of a Llama in the forms that ``whole_models.py`` compares, all with the same weights.

``plain``: unsharded. ``torch``: the plain blocks under torchtitan's tensor-parallel plan.
``styles``: the plan with the styles of ``mkernel.nn``. ``nn``: the blocks of ``mkernel.nn``.
``floor``: the products of ``nn``, its attention and its norms, with nothing communicated.
Activations are [batch, sequence, hidden]; between blocks a rank has its part of the sequence. A
decoder's are replicated. Embeddings and the head are left out: with few layers they would outweigh
the blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.nn.functional import scaled_dot_product_attention, silu

from mkernel import nn as mkernel_nn
from mkernel.ops.columns import parts_of_columns

SEQUENCE = 1
FORMS = ("torch", "styles", "nn", "floor")
MERGED = {
    "attention.qkv_proj": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
ROWWISE = ("attention.o_proj", "mlp.down_proj")
NORMS = ("attention_norm", "mlp_norm")


class Width(NamedTuple):
    """The sizes of a block, and how many blocks a model has unless the caller says otherwise."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Product(NamedTuple):
    """A communicating op of a block: its name and the sizes of its product on one rank."""

    op: str
    n: int
    k: int


WIDTHS = {
    "8b": Width(4096, 14336, 32, 8, 4),
    "70b": Width(8192, 28672, 64, 8, 2),
    "tiny": Width(64, 128, 4, 2, 2),
}


def products(width: Width, world: int, measure: str) -> list[Product]:
    """List the communicating ops of one block. A backward pass gathers the gradients that the forward
    pass scattered, and scatters those of what it gathered."""
    hidden, inner = width.hidden, width.inner // world
    heads = width.heads * width.head_dim // world
    qkv = (width.heads + 2 * width.kv_heads) * width.head_dim // world
    if measure == "decode":
        return [Product("gemm_all_reduce", hidden, k) for k in (heads, inner)]
    gathers = [qkv, 2 * inner, *((heads, inner) if measure == "step" else ())]
    scatters = [heads, inner, *((qkv, 2 * inner) if measure == "step" else ())]
    return [
        *(Product("all_gather_gemm", n, hidden) for n in gathers),
        *(Product("gemm_reduce_scatter", hidden, k) for k in scatters),
    ]


def rotary(width: Width, sequence: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [sequence, head_dim]."""
    half = torch.arange(0, width.head_dim, 2, device=like.device) / width.head_dim
    angles = torch.outer(torch.arange(sequence, device=like.device), 500_000.0**-half)
    whole = torch.cat((angles, angles), dim=-1)
    return whole.cos().to(like.dtype), whole.sin().to(like.dtype)


def attended(
    q: Tensor, k: Tensor, v: Tensor, turned: tuple[Tensor, Tensor], head_dim: int
) -> Tensor:
    """Return attention [batch, sequence, features] of projections of whole sequences."""
    q, k, v = (each.unflatten(-1, (-1, head_dim)).transpose(1, 2) for each in (q, k, v))
    q, k = _rotated(q, *turned), _rotated(k, *turned)
    if q.dtype == torch.float32 and q.is_cuda:  # of grouped heads torch would keep all scores
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(-2)


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class PlainAttention(nn.Module):
    def __init__(self, width: Width, **options: Any) -> None:
        super().__init__()
        self.head_dim = width.head_dim
        keys = width.kv_heads * width.head_dim
        self.q_proj = nn.Linear(width.hidden, width.hidden, bias=False, **options)
        self.k_proj = nn.Linear(width.hidden, keys, bias=False, **options)
        self.v_proj = nn.Linear(width.hidden, keys, bias=False, **options)
        self.o_proj = nn.Linear(width.hidden, width.hidden, bias=False, **options)

    def forward(self, x: Tensor, turned: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        y: Tensor = self.o_proj(attended(q, k, v, turned, self.head_dim))
        return y


class PlainMLP(nn.Module):
    def __init__(self, width: Width, **options: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width.hidden, width.inner, bias=False, **options)
        self.up_proj = nn.Linear(width.hidden, width.inner, bias=False, **options)
        self.down_proj = nn.Linear(width.inner, width.hidden, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    """A block. It returns a tuple: what comes after it, and what must not be optimised away."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor, turned: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        x = x + self.attention(self.attention_norm(x), turned)
        return (x + self.mlp(self.mlp_norm(x)),)


class _Gathered(torch.autograd.Function):
    """Every rank's rows, which were there all the time; of their gradient this rank's part is read."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, whole: Tensor) -> Tensor:
        ctx.rows = own.shape[SEQUENCE]
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.narrow(SEQUENCE, 0, ctx.rows), None


class FloorBlock(nn.Module):
    """The products, attention and norms of a rank.

    ``whole`` [batch, sequence, hidden]: what products read in place of what would have been gathered;
    the caller sets it. None: a decoder's. The block returns its norms' results, which nothing reads,
    and the products that would have been scattered: the caller gives their gradients, in place of
    those that would have been gathered. Were these gradients constants, the compiler would move most
    of the backward pass into the forward one.
    """

    whole: Tensor | None = None

    def __init__(
        self, width: Width, world: int, norms: Sequence[nn.Module], **options: Any
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.head_dim = width.head_dim
        queries = width.heads * width.head_dim // world
        keys = width.kv_heads * width.head_dim // world
        self.features = [queries, keys, keys]
        inner = width.inner // world
        self.attention, self.mlp = nn.Module(), nn.Module()
        made = {"bias": False, **options}
        self.attention.qkv_proj = nn.Linear(width.hidden, sum(self.features), **made)
        self.attention.o_proj = nn.Linear(queries, width.hidden, **made)
        self.mlp.gate_up_proj = nn.Linear(width.hidden, 2 * inner, **made)
        self.mlp.down_proj = nn.Linear(inner, width.hidden, **made)

    def forward(self, x: Tensor, turned: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        rows = x.shape[SEQUENCE]
        first = self.attention_norm(x)
        qkv = self.attention.qkv_proj(self._gathered(first))
        mixed = attended(*parts_of_columns(qkv, self.features), turned, self.head_dim)
        from_attention = self.attention.o_proj(mixed)
        x = x + from_attention.detach().narrow(SEQUENCE, 0, rows)
        second = self.mlp_norm(x)
        merged = self.mlp.gate_up_proj(self._gathered(second))
        gate, up = parts_of_columns(merged, [merged.shape[-1] // 2] * 2)
        from_mlp = self.mlp.down_proj(silu(gate) * up)
        x = x + from_mlp.detach().narrow(SEQUENCE, 0, rows)
        return x, first.detach(), second.detach(), from_attention, from_mlp

    def _gathered(self, x: Tensor) -> Tensor:
        found: Tensor = x if self.whole is None else _Gathered.apply(x, self.whole)
        return found


def _norms(width: Width, **options: Any) -> list[nn.Module]:
    return [nn.RMSNorm(width.hidden, eps=1e-5, **options) for _ in NORMS]


def plain(width: Width, layers: int, seed: int, **options: Any) -> list[nn.Module]:
    """Make unsharded blocks, of the same weights on every rank."""
    torch.manual_seed(seed)
    return [
        Block(
            PlainAttention(width, **options), PlainMLP(width, **options), _norms(width, **options)
        )
        for _ in range(layers)
    ]


def sharded(
    form: str, whole: Sequence[nn.Module], width: Width, mesh: DeviceMesh, decode: bool
) -> list[nn.Module]:
    """Return this rank's part of unsharded blocks, in one of :data:`FORMS`. Collective."""
    if form in ("torch", "styles"):
        plan = _torch_plan if form == "torch" else _styles_plan
        return [
            torch_styles.parallelize_module(copy.deepcopy(block), mesh, plan(decode))
            for block in whole
        ]
    weight = next(whole[0].parameters())
    options = {"device": weight.device, "dtype": weight.dtype}
    made = []
    for block in whole:
        one = _nn_block(width, mesh, decode, options)
        one.load_state_dict(block.state_dict())
        if form == "floor":
            state = one.state_dict()
            one = FloorBlock(width, mesh.size(), _norms(width, **options), **options)
            one.load_state_dict(state)
        made.append(one)
    return made


def _nn_block(width: Width, mesh: DeviceMesh, decode: bool, options: dict[str, Any]) -> nn.Module:
    given: dict[str, Any] = {"sequence_parallel": not decode, "group": mesh, **options}
    return Block(
        mkernel_nn.ParallelAttention(width.hidden, width.heads, width.kv_heads, **given),
        mkernel_nn.ParallelMLP(width.hidden, width.inner, **given),
        _norms(width, **options),
    )


def _torch_plan(decode: bool) -> dict[str, Any]:
    """Return torchtitan's plan of a block: one gather for the layers that share an input."""
    outside = Replicate() if decode else Shard(SEQUENCE)
    plan: dict[str, Any] = {}
    for layer in (each for parts in MERGED.values() for each in parts):
        plan[layer] = torch_styles.ColwiseParallel()
    for layer in ROWWISE:
        plan[layer] = torch_styles.RowwiseParallel(output_layouts=outside)
    if not decode:
        plan |= dict.fromkeys(NORMS, torch_styles.SequenceParallel())
        prepare = torch_styles.PrepareModuleInput
        plan["attention"] = prepare(
            input_layouts=(outside, None), desired_input_layouts=(Replicate(), None)
        )
        plan["mlp"] = prepare(input_layouts=(outside,), desired_input_layouts=(Replicate(),))
    return plan


def _styles_plan(decode: bool) -> dict[str, Any]:
    """Return the plan with our styles, whose layers gather while they multiply."""
    outside = Replicate() if decode else Shard(SEQUENCE)
    plan: dict[str, Any] = {}
    for layer in (each for parts in MERGED.values() for each in parts):
        plan[layer] = mkernel_nn.ColwiseParallel(input_layouts=outside)
    for layer in ROWWISE:
        plan[layer] = mkernel_nn.RowwiseParallel(output_layouts=outside)
    if not decode:
        plan |= dict.fromkeys(NORMS, torch_styles.SequenceParallel())
    return plan


Run = Callable[[Tensor, tuple[Tensor, Tensor]], tuple[Tensor, list[Tensor]]]


def stack(blocks: Sequence[Callable[..., tuple[Tensor, ...]]]) -> Run:
    """Return the function that applies blocks one after another."""

    def run(x: Tensor, turned: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
        kept: list[Tensor] = []
        for block in blocks:
            x, *others = block(x, turned)
            kept += others
        return x, kept

    return run


def own_part(name: str, whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the part of an unsharded parameter, or of its gradient, that a rank has."""
    layer = name.removesuffix(".weight")
    if layer in NORMS:
        return whole
    return whole.chunk(mesh.size(), 1 if layer in ROWWISE else 0)[mesh.get_local_rank()]


def local(found: Tensor) -> Tensor:
    """Return what a rank has of a tensor."""
    return found.to_local() if isinstance(found, DTensor) else found


def local_part(name: str, found: Tensor) -> Tensor:
    """Return a gradient as this rank has it, that of a norm summed over the ranks. Collective."""
    if name.removesuffix(".weight") in NORMS:
        if isinstance(found, DTensor):
            return found.full_tensor()
        total = found.clone()
        distributed.all_reduce(total)
        return total
    return local(found)


def merged(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return one block's gradients by the names of ``nn``, whose products are merged."""
    found = dict(parts)
    for name, layers in MERGED.items():
        if f"{name}.weight" not in found:
            found[f"{name}.weight"] = torch.cat([found.pop(f"{each}.weight") for each in layers])
    return found
