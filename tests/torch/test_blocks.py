"""Tensor-parallel blocks have the results and gradients of unsharded ones, and load what both saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import scaled_dot_product_attention, silu

import mkernel
from mkernel.errors import ArgumentError
from mkernel.nn import ColumnParallelLinear, ParallelAttention, ParallelMLP

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

RANKS = 2
B, S, H, INNER = 3, 8, 16, 20
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 6


class Mlp(Module):
    """In plain torch."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(H, INNER, bias=bias), Linear(H, INNER, bias=bias)
        self.down_proj = Linear(INNER, H, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Attention(Module):
    """In plain torch; keys and values are repeated for the queries that share them."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = Linear(H, HEADS * HEAD_DIM, bias=bias)
        self.k_proj = Linear(H, KV_HEADS * HEAD_DIM, bias=bias)
        self.v_proj = Linear(H, KV_HEADS * HEAD_DIM, bias=bias)
        self.o_proj = Linear(HEADS * HEAD_DIM, H, bias=bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        angle = torch.complex(*(each[:, : HEAD_DIM // 2] for each in rotary))

        def heads(y: Tensor, turned: bool) -> Tensor:
            y = y.view(B, S, -1, HEAD_DIM).transpose(1, 2)
            if turned:
                y = torch.complex(*y.chunk(2, dim=-1)) * angle
                y = torch.cat((y.real, y.imag), dim=-1)
            return y.repeat_interleave(HEADS // y.shape[1], dim=1)

        q, k = heads(self.q_proj(x), True), heads(self.k_proj(x), True)
        y = scaled_dot_product_attention(q, k, heads(self.v_proj(x), False), is_causal=True)
        z: Tensor = self.o_proj(y.transpose(1, 2).reshape(B, S, -1))
        return z


def rotary() -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(S).float(), torch.arange(1, HEAD_DIM // 2 + 1) / 3)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def unsharded(kind: str, bias: bool) -> tuple[Module, tuple[Any, ...]]:
    torch.manual_seed(4)
    return (Mlp(bias), ()) if kind == "mlp" else (Attention(bias), (rotary(),))


def block(kind: str, bias: bool, sequence_parallel: bool) -> Module:
    if kind == "mlp":
        return ParallelMLP(H, INNER, bias=bias, sequence_parallel=sequence_parallel)
    return ParallelAttention(
        H, HEADS, KV_HEADS, HEAD_DIM, bias=bias, sequence_parallel=sequence_parallel
    )


def trained(kind: str, bias: bool, sequence_parallel: bool, compiled: bool) -> dict[str, Any]:
    """A rank's output and gradients; the gradients of parameters under their unsharded names."""
    world = mkernel.world()
    whole, more = unsharded(kind, bias)
    model = block(kind, bias, sequence_parallel)
    model.load_state_dict(whole.state_dict())
    x = torch.randn(B, S, H, generator=torch.Generator().manual_seed(5))
    if sequence_parallel:
        x = x.chunk(RANKS, 1)[world.rank].contiguous()
    x.requires_grad_()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    y = run(x, *more)
    y.sin().sum().backward()
    assert x.grad is not None
    found = {"y": y.detach(), "x": x.grad}
    for name, parameter in model.named_parameters():
        layer, _, leaf = name.rpartition(".")
        merged = model.get_submodule(layer)
        assert parameter.grad is not None
        if hasattr(merged, "layers"):
            sizes = [size // RANKS for size in merged.layers.values()]
            for each, part in zip(merged.layers, parameter.grad.split(sizes), strict=True):
                found[f"{each}.{leaf}"] = part
        else:
            found[name] = parameter.grad
    return found


@pytest.mark.parametrize(
    ("bias", "sequence_parallel", "compiled"),
    [(True, True, False), (False, True, True), (True, False, False), (False, False, True)],
)
@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_a_block_is_the_unsharded_one(
    kind: str, bias: bool, sequence_parallel: bool, compiled: bool
) -> None:
    whole, more = unsharded(kind, bias)
    x = torch.randn(B, S, H, generator=torch.Generator().manual_seed(5)).requires_grad_()
    y = whole(x, *more)
    y.sin().sum().backward()
    gradients = {name: each.grad for name, each in whole.named_parameters()}
    everywhere = on_ranks(trained, kind, bias, sequence_parallel, compiled)
    for rank, found in enumerate(everywhere):
        assert found.keys() == {"y", "x", *gradients}
        for name, each in {"y": y.detach(), "x": x.grad, **gradients}.items():
            assert each is not None
            split: int | None = 1 if sequence_parallel else None
            if name in gradients:
                row_parallel = name.startswith(("down", "o_"))
                split = 0 if not row_parallel else 1 if name.endswith("weight") else None
            wanted = each if split is None else each.chunk(RANKS, split)[rank]
            torch.testing.assert_close(
                found[name], wanted, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


class Layer(Module):
    def __init__(self, mlp: Module, attention: Module) -> None:
        super().__init__()
        self.mlp, self.self_attn = mlp, attention


def reloaded() -> tuple[bool, str]:
    """Whether what a rank saved is what it loads, inside of another module; what is said of sizes that
    do not fit."""
    assert ColumnParallelLinear.from_linear(Linear(H, INNER, bias=False)).bias is None
    whole = Layer(unsharded("mlp", True)[0], unsharded("attention", True)[0])
    made, again = (
        Layer(block("mlp", True, True), block("attention", True, True)) for _ in range(2)
    )
    state = whole.state_dict()
    kept = list(state)
    made.load_state_dict(state)
    assert list(state) == kept
    again.load_state_dict(made.state_dict())
    pairs = zip(made.parameters(), again.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    merged = torch.cat([state["mlp.gate_proj.weight"], state["mlp.up_proj.weight"]])
    again.mlp.gate_up_proj.load_state_dict(  # as some models save it
        {"weight": merged, "bias": made.mlp.gate_up_proj.bias}
    )
    same &= torch.equal(again.mlp.gate_up_proj.weight, made.mlp.gate_up_proj.weight)
    state["mlp.up_proj.weight"] = torch.zeros(INNER + 2, H)
    try:
        made.load_state_dict(state)
    except RuntimeError as error:
        return same, str(error)
    return same, ""


def test_state_dicts_of_a_rank_and_of_the_whole_are_loaded() -> None:
    for same, error in on_ranks(reloaded):
        assert same
        assert f"mlp.up_proj.weight [{INNER + 2}, {H}]" in error


def refused() -> list[str]:
    said = []
    for make in (
        lambda: ParallelMLP(H, INNER + 1),
        lambda: ParallelAttention(H, 4, 3),
        lambda: ParallelAttention(H, 3, 1, 4),
        lambda: ParallelAttention(H + 1, 4),
    ):
        with pytest.raises(ArgumentError) as error:
            make()
        said.append(str(error.value))
    return said


def test_sizes_that_ranks_cannot_share_are_refused_by_name() -> None:
    words = ("gate_proj = 21", "heads = 4", "kv_heads = 1", "hidden_size = 17")
    for said in on_ranks(refused):
        for text, word in zip(said, words, strict=True):
            assert word in text
