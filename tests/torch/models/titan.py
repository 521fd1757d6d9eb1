"""torchtitan's Llama and its plan, as they were while torchtitan used ``parallelize_module`` (to 0.2).

torchtitan itself asks for a nightly torch and for packages of data sets and loggers. The names of
modules and the plan are its own (``models/llama3``); the styles are an argument, as the plan imports
them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention, silu

HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 64, 96, 4, 2, 96


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = HIDDEN // HEADS
        self.wq = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wk = nn.Linear(HIDDEN, self.width * KV_HEADS, bias=False)
        self.wv = nn.Linear(HIDDEN, self.width * KV_HEADS, bias=False)
        self.wo = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (
            layer(x).view(batch, sequence, -1, self.width).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        q, k = rotated(q, freqs), rotated(k, freqs)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return y


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, INNER, bias=False)
        self.w2 = nn.Linear(INNER, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, INNER, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(silu(self.w1(x)) * self.w3(x))
        return y


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs)
        y: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return y


class Transformer(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleDict({str(layer): TransformerBlock() for layer in range(layers)})
        self.norm = nn.RMSNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        freqs = frequencies(tokens.shape[1]).to(tokens.device)
        for layer in self.layers.values():
            h = layer(h, freqs)
        y: Tensor = self.output(self.norm(h))
        return y


def frequencies(sequence: int) -> Tensor:
    """Return angles [sequence, width / 2]."""
    width = HIDDEN // HEADS
    speeds = 10000.0 ** (-torch.arange(0, width, 2) / width)
    return torch.outer(torch.arange(sequence), speeds)


def rotated(x: Tensor, freqs: Tensor) -> Tensor:
    freqs = freqs.to(x.dtype)
    first, second = x.chunk(2, -1)
    cos, sin = freqs.cos(), freqs.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def apply_tp(model: nn.Module, tp_mesh: DeviceMesh, styles: Any) -> None:
    """Apply torchtitan's plan, with loss parallelism's layout of logits. ``styles``: what the plan
    imports, torch's module or this package's."""
    parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": styles.RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1)
            ),
            "norm": SequenceParallel(),
            "output": styles.ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    layers: Any = model.layers
    for block in layers.values():
        layer_plan = {
            "attention_norm": SequenceParallel(),
            "attention": styles.PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            "attention.wq": styles.ColwiseParallel(),
            "attention.wk": styles.ColwiseParallel(),
            "attention.wv": styles.ColwiseParallel(),
            "attention.wo": styles.RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": styles.PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": styles.ColwiseParallel(),
            "feed_forward.w2": styles.RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": styles.ColwiseParallel(),
        }
        parallelize_module(block, tp_mesh, layer_plan)
