"""A checkpoint of transformers in e4m3 by blocks (``weight_scale_inv``), tensor parallel in two ways.

    pip install "transformers>=5" accelerate
    torchrun --nproc-per-node 2 examples/frameworks/transformers_fp8.py  # on GPUs where there are

``dequantised``: transformers makes wide weights of it, and mkernel's plan splits them. ``e4m3``: row
layers multiply the checkpoint's own values, and sum over ranks as they do. The checkpoint is a small
Llama's, made here in the layout of published ones. Exit code 1 where the dequantised model's logits or
tokens differ from the unsharded one's, or those of e4m3 by more than rounded activations explain.
"""

import argparse
import copy
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig
from transformers.integrations.finegrained_fp8 import Fp8Quantize

import mkernel

BLOCK, E4M3 = 128, torch.float8_e4m3fn
SIZES = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
}  # fmt: skip
ROWS = ("self_attn.o_proj", "mlp.down_proj")
ROUNDED = (len(ROWS) * SIZES["num_hidden_layers"]) ** 0.5 * 2**-5
"""The mean error of as many independent roundings of activations to e4m3."""


def written(folder: Path) -> None:
    """Write config.json and model.safetensors, whose linear layers are in e4m3 but for the head."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).requires_grad_(False)
    how = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK))
    entries = {}
    for name, weight in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            entries[name] = weight
            continue
        n, k = (size // BLOCK for size in weight.shape)
        sizes = torch.randn(n, k).exp()  # blocks are of unlike sizes
        weight.mul_(sizes.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1))
        entries |= Fp8Quantize(SimpleNamespace(quantization_config=how)).convert({name: weight})
    save_file(entries, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.quantization_config = how.to_dict()
    model.config.save_pretrained(folder)


class ScaledRowLinear(nn.Module):
    """A row layer of e4m3 values with one scale for 128 x 128 weights, and for 128 inputs of a row."""

    def __init__(self, weight: Tensor, scale_inv: Tensor, world: mkernel.World) -> None:
        """Take this rank's part of ``weight`` [N, K] and of its scales [N / 128, K / 128]."""
        super().__init__()
        self.group = world.name
        own = [each.chunk(world.size, 1)[world.rank] for each in (weight, scale_inv.float())]
        self.register_buffer("values", own[0].contiguous())
        self.register_buffer("scale", own[1].t().contiguous())  # [K / 128, N / 128], as ops take it

    def forward(self, x: Tensor) -> Tensor:
        """The sum over ranks of x [..., K / W] @ weight^T."""
        blocks = x.flatten(0, -2).unflatten(-1, (-1, BLOCK)).float()
        scale = (blocks.abs().amax(-1) / torch.finfo(E4M3).max).clamp(min=1e-12)
        rows = (blocks / scale[..., None]).to(E4M3).flatten(1)
        y = mkernel.gemm_all_reduce(
            rows, self.values.t(), a_scale=scale, b_scale=self.scale, group=self.group
        )
        return y.view(*x.shape[:-1], -1).to(x.dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", default="streams")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    world = mkernel.init(mesh, accelerator=options.accelerator)

    with tempfile.TemporaryDirectory() as folder:  # each rank's own; the same in each
        written(Path(folder))
        wide = FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), dequantize=True)
        reference = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=wide, dtype=torch.float32
        ).to(device)
        entries = load_file(Path(folder) / "model.safetensors", device=device)

    dequantised = copy.deepcopy(reference)
    parallelize_module(dequantised, mesh, mkernel.nn.transformers_plan(dequantised))

    e4m3 = copy.deepcopy(reference)
    plan = mkernel.nn.transformers_plan(e4m3)
    parallelize_module(e4m3, mesh, {name: plan[name] for name in plan if not name.endswith(ROWS)})
    for number, layer in enumerate(e4m3.model.layers):
        for name in ROWS:
            key = f"model.layers.{number}.{name}.weight"
            row = ScaledRowLinear(entries[key], entries[f"{key}_scale_inv"], world)
            layer.set_submodule(name, row)

    tokens = torch.arange(2 * 32, device=device).view(2, 32) % SIZES["vocab_size"]
    with torch.no_grad():
        expected = reference(tokens).logits
        generate = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        texts = [each.generate(tokens, **generate) for each in (reference, dequantised)]
        good = torch.equal(*texts)
        for name, model, most in (("dequantised", dequantised, 1e-4), ("e4m3", e4m3, ROUNDED)):
            error = float((model(tokens).logits - expected).norm() / expected.norm())
            good = good and error <= most
            print(f"rank {world.rank}: logits of {name} differ by {error:.1e}")
    mkernel.finalize()
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
