"""Layers over a sequence that ranks share: the zigzag split, RingAttention, and a Llama with it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from ranks import close, on_ranks, operand
from torch import Tensor, distributed
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import mkernel
from mkernel import zigzag_merge, zigzag_positions, zigzag_split
from mkernel.errors import ArgumentError, NotInitialized, ShapeError
from mkernel.nn import RingAttention

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

B, S, HEADS, KV_HEADS, WIDTH = 2, 24, 4, 2, 8
RANKS = 3


# ---- the split -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_split_sequence_is_merged_again(size: int, dim: int) -> None:
    x = torch.arange(12 * 12 * 12).view(12, 12, 12)
    parts = [zigzag_split(x, size, rank, dim=dim) for rank in range(size)]
    assert torch.equal(zigzag_merge(parts, dim=dim), x)
    if size == 2:
        assert parts[0].select(dim, 3).equal(x.select(dim, 9))
        assert parts[1].select(dim, 0).equal(x.select(dim, 3))


def test_gradients_flow_to_the_positions_that_a_rank_holds() -> None:
    x = torch.ones(1, 8, requires_grad=True)
    zigzag_split(x, 2, 1).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0, 0, 1, 1, 1, 1, 0, 0]]


def test_what_cannot_be_split_or_merged_is_refused() -> None:
    with pytest.raises(ShapeError, match="multiple of 4"):
        zigzag_split(torch.ones(1, 6), 2, 0)
    with pytest.raises(ArgumentError, match="0 to 1"):
        zigzag_split(torch.ones(1, 8), 2, 2)
    with pytest.raises(ShapeError, match=r"parts\[1\]"):
        zigzag_merge([torch.ones(1, 4), torch.ones(1, 6)])
    with pytest.raises(ShapeError, match="two halves"):
        zigzag_merge([torch.ones(1, 3)])
    with pytest.raises(ShapeError, match="one of each rank"):
        zigzag_merge([])


# ---- the layer -----------------------------------------------------------------------------------


def whole() -> list[Tensor]:
    """q, k, v [B, S, H, D] of all positions."""
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    return [operand(name, 0, B, S, heads[name], WIDTH) for name in heads]


def positions(causal: bool, rank: int) -> Tensor:
    return zigzag_positions(S, RANKS, rank) if causal else torch.arange(S).chunk(RANKS)[rank]


DOCUMENTS = [0, 3, 15, 16, S]


def expected(causal: bool, scale: float | None, how: str = "") -> list[Tensor]:
    """out and gradients of q, k, v of all positions, in float64."""
    mask = torch.ones(S, S).bool()
    if causal:
        mask = mask.tril()
    if how == "packed":
        document = torch.bucketize(torch.arange(S), torch.tensor(DOCUMENTS), right=True)
        mask &= document[:, None] == document[None, :]
    inputs = [each.double().requires_grad_() for each in whole()]
    turned = [each.transpose(1, 2) for each in inputs]
    out = scaled_dot_product_attention(*turned, attn_mask=mask, scale=scale, enable_gqa=True)
    out = out.transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), inputs)]


def attended(causal: bool, scale: float | None, how: str) -> list[Tensor]:
    layer: Any = RingAttention(causal=causal, scale=scale)
    mine = positions(causal, mkernel.world().rank)
    inputs = [each[:, mine] for each in whole()]
    if how == "strided":  # as slices of one product of all three
        merged = torch.cat(inputs, 2)
        inputs = list(merged.split([HEADS, KV_HEADS, KV_HEADS], 2))
        assert not inputs[0].is_contiguous()
    inputs = [each.detach().requires_grad_() for each in inputs]
    graphs = CompileCounterWithBackend("aot_eager")
    if how in ("compiled", "packed"):
        layer = torch.compile(layer, backend=graphs, fullgraph=True)
    bounds = torch.tensor(DOCUMENTS, dtype=torch.int32) if how == "packed" else None
    out = layer(*inputs, bounds)
    assert out.is_contiguous()
    assert graphs.frame_count == (how in ("compiled", "packed"))
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), inputs)]


@pytest.mark.parametrize(
    ("causal", "scale", "how"),
    [
        (True, None, "plain"),
        (False, 0.2, "plain"),
        (True, 0.2, "strided"),
        (True, None, "compiled"),
        (True, None, "packed"),
        (False, None, "packed"),
    ],
)
def test_a_layer_is_the_unsharded_attention(causal: bool, scale: float | None, how: str) -> None:
    wanted = expected(causal, scale, how)
    for rank, found in enumerate(on_ranks(attended, causal, scale, how, ranks=RANKS)):
        mine = positions(causal, rank)
        for name, one, other in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
            close(one, other[:, mine], 1e-5, f"rank {rank}, {name}")


def forwarded() -> Tensor:
    mine = positions(True, mkernel.world().rank)
    with torch.no_grad():
        return RingAttention(causal=True)(*(each[:, mine].half() for each in whole()))


def test_an_accelerator_that_takes_heads_outermost_alone_gets_copies() -> None:
    wanted = expected(True, None)[0]
    for rank, out in enumerate(on_ranks(forwarded, ranks=RANKS, accelerator="ascend")):
        close(out, wanted[:, positions(True, rank)], 2e-3, f"rank {rank}")


def test_a_layer_is_made_in_a_world() -> None:
    with pytest.raises(NotInitialized):
        RingAttention()


# ---- Hugging Face --------------------------------------------------------------------------------

VOCABULARY, TOKENS = 96, 20


def small_llama(attention: str) -> Any:
    """Random weights, the same in every process."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def llama(bounds: list[int]) -> dict[str, float]:
    """Relative differences of logits and gradients from those of the model that has all positions, of
    documents that begin at these."""
    from transformers import AttentionInterface

    world = mkernel.world()
    ring = RingAttention(causal=True)
    documents = torch.tensor(bounds, dtype=torch.int32) if len(bounds) > 2 else None
    calls = []

    def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Any:
        assert mask is None
        calls.append(q.shape)
        return ring(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), documents), None

    AttentionInterface.register("ring", attend)
    model, reference = small_llama("ring"), small_llama("sdpa")
    tokens = torch.randint(VOCABULARY, (B, TOKENS), generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, 1)
    places = torch.cat([torch.arange(end - begin) for begin, end in pairwise(bounds)])[None]
    mine = zigzag_split(places, world.size, world.rank)
    ids, own_labels = (zigzag_split(each, world.size, world.rank) for each in (tokens, labels))
    logits = model(input_ids=ids, position_ids=mine, use_cache=False).logits
    loss(logits, own_labels).backward()
    wanted = reference(input_ids=tokens, position_ids=places, use_cache=False).logits
    loss(wanted, labels).backward()
    assert calls == [(B, 4, TOKENS // world.size, 8)] * 2

    parts = [torch.empty_like(logits) for _ in range(world.size)]
    distributed.all_gather(parts, logits.detach())

    def apart(one: Tensor, other: Tensor) -> float:
        return float((one - other).norm() / other.norm())

    found = {"logits": apart(zigzag_merge(parts), wanted.detach())}
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        distributed.all_reduce(one.grad)
        found[name] = apart(one.grad, other.grad)
    return found


@pytest.mark.parametrize("bounds", [[0, TOKENS], [0, 3, 14, TOKENS]], ids=["whole", "packed"])
def test_a_llama_over_two_ranks_is_the_unsharded_one(bounds: list[int]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for found in on_ranks(llama, bounds):
        assert len(found) > 20
        wrong = {name: error for name, error in found.items() if not error <= 2e-5}
        assert not wrong
