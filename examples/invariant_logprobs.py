"""Score sequences with a Llama of transformers: alone, in batches and tensor parallel, with equal bits.

    torchrun --nproc-per-node 4 examples/invariant_logprobs.py   # on GPUs where there are any
    torchrun --nproc-per-node 2 examples/invariant_logprobs.py \
        --accelerator hopper --width 1024 --dtypes bfloat16   # fused kernels take no float32

Reinforcement learning compares the log-probabilities of a trainer with those of a server, which batch
and shard differently. Here every product is mkernel's with invariant results. What torch computes
between them (the embedding, norms, rotary, attention, activations, log_softmax) is only as invariant as
torch makes it, so each of these ops is measured by itself first: rows alone beside rows in a batch.

A batch has its sequences one behind another, without padding, and attention takes one sequence at a
time. Over a padded batch torch's attention is another computation, as its line shows where it differs.

Exit code 1 where a log-probability has other bits than that of the sequence scored alone by one rank.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import mkernel
from mkernel.nn import ColwiseParallel

VOCABULARY, HEADS, LENGTHS = 256, 8, (5, 17, 40, 33, 24, 9)
BATCHES = [[at] for at in range(len(LENGTHS))] + [[5, 2, 0], [3, 1, 4, 0, 2, 5], [1, 2]]
"""The sequences of each batch: alone, and among others in some order."""


def by_sequence(
    module: object, q: Tensor, k: Tensor, v: Tensor, mask: object, *, scaling: float,
    cu_seq_lens_q: Sequence[int], **options: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of each sequence by itself, of q, k and v [1, heads, positions, width]."""
    found = [
        functional.scaled_dot_product_attention(
            *(each[:, :, first:end] for each in (q, k, v)),
            is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1],
        )
        for first, end in pairwise(cu_seq_lens_q)
    ]  # fmt: skip
    return torch.cat(found, 2).transpose(1, 2), None


def llama(width: int) -> PreTrainedModel:
    """A model with the same random parameters on every rank."""
    torch.manual_seed(0)
    AttentionInterface.register("by_sequence", by_sequence)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, attn_implementation="by_sequence",
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def scored(model: PreTrainedModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    """The log-probability of each token but the first, for each sequence of a batch."""
    lengths = [len(each) for each in sequences]
    tokens = torch.cat(list(sequences))[None]
    starts = [sum(lengths[:at]) for at in range(len(lengths) + 1)]
    logits = model(
        input_ids=tokens,
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        cu_seq_lens_q=starts,
        use_cache=False,
    ).logits
    whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
    rows = functional.log_softmax(whole[0].float(), -1).split(lengths)
    return [
        each[:-1].gather(1, sequence[1:, None])[:, 0]
        for each, sequence in zip(rows, sequences, strict=True)
    ]


def differing(f: Callable[[Tensor], Tensor], rows: Tensor) -> str:
    """In how many rows f has other bits where they stand alone, or in another order."""
    whole, turned = f(rows), f(rows.flip(0)).flip(0)
    alone = torch.cat([f(rows[at : at + 1]) for at in range(len(rows))])
    others = [(each != whole).flatten(1).any(1) for each in (alone, turned)]
    return f"{int((others[0] | others[1]).sum())} of {len(rows)} differ"


def ops_of_torch(model: PreTrainedModel) -> dict[str, str]:
    """The invariance of what torch computes: of rows, of heads, and of sequences of a batch."""
    block, width = model.model.layers[0], model.config.hidden_size
    x, inner = torch.randn(160, width), torch.randn(160, 2 * width)
    q, k, v = (torch.randn(len(LENGTHS), HEADS, max(LENGTHS), width // HEADS) for _ in range(3))
    positions = torch.arange(160)[:, None]

    def attended(*given: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(*given, is_causal=True)

    by_head = torch.stack((q[1], k[1], v[1]), 1)  # [heads, 3, positions, width]
    sequences = torch.stack((q, k, v), 1)
    whole = attended(q, k, v)
    padded = sum(
        not torch.equal(attended(*(each[at : at + 1, :, :length] for each in (q, k, v))),
                        whole[at : at + 1, :, :length])
        for at, length in enumerate(LENGTHS)
    )  # fmt: skip
    return {
        "embedding": differing(
            lambda at: functional.embedding(at, model.model.embed_tokens.weight),
            torch.randint(VOCABULARY, (160,)),
        ),
        "rms norm": differing(block.input_layernorm, x),
        "rotary": differing(lambda at: torch.cat(model.model.rotary_emb(x, at), -1), positions),
        "attention, by heads": differing(lambda each: attended(*each.unbind(1)), by_head),
        "attention, by sequences of one length": differing(
            lambda each: attended(*each.unbind(1)), sequences
        ),
        "attention, of padded sequences": f"{padded} of {len(LENGTHS)} differ",
        "silu, product": differing(
            lambda each: block.mlp.act_fn(each[:, :width]) * each[:, width:], inner
        ),
        "residual": differing(lambda each: each + each.flip(1), x),
        "log_softmax": differing(
            lambda each: functional.log_softmax(each.float(), -1), torch.randn(160, VOCABULARY)
        ),
    }


def parallel(width: int, tp: int, device: str, accelerator: str, invariant: bool) -> list[Tensor]:
    """What every batch has on groups of ``tp`` ranks, with the sequences of all batches in a row."""
    mesh = init_device_mesh(device, (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    mkernel.init(mesh["tp"], accelerator=accelerator, invariant=invariant)
    model = llama(width)
    plan = mkernel.nn.transformers_plan(model)
    # Torch's own style would multiply by torch. The columns are gathered above.
    plan["lm_head"] = ColwiseParallel(use_local_output=False)
    parallelize_module(model, mesh["tp"], plan)
    drawn = torch.Generator(device).manual_seed(1)
    sequences = [
        torch.randint(VOCABULARY, (length,), generator=drawn, device=device) for length in LENGTHS
    ]
    found = [each for batch in BATCHES for each in scored(model, [sequences[at] for at in batch])]
    mkernel.finalize()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=128, help="of the model, a multiple of 128")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--accelerator", default="streams")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_default_device(device)

    good = True
    for dtype, invariant in product(options.dtypes, (False, True)):
        torch.set_default_dtype(getattr(torch, dtype))
        if rank == 0 and not invariant:
            for name, each in ops_of_torch(llama(options.width)).items():
                print(f"torch's {name}, {dtype}: {each}")
        wanted: dict[int, Tensor] = {}  # by sequence, scored alone by one rank
        for tp in (tp for tp in (1, 2, 4, 8) if size % tp == 0):
            found = parallel(options.width, tp, device, options.accelerator, invariant)
            named = [at for batch in BATCHES for at in batch]
            same, count = 0, 0
            for at, each in zip(named, found, strict=True):
                one = wanted.setdefault(at, each)
                same, count = same + int((one == each).sum()), count + len(each)
            print(
                f"rank {rank}, {dtype}, TP {tp}, {'invariant' if invariant else 'as usual'}: {same} of "
                f"{count} log-probabilities have the bits of their sequence alone on one rank"
            )
            good = good and (same == count or not invariant)
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
