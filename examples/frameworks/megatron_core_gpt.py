"""A GPT of Megatron-Core whose parallel linear layers are mkernel's, beside the same one with its own.

    pip install --no-deps megatron-core==0.16.1    # docs/frameworks/megatron-core.md has all versions
    torchrun --nproc-per-node 2 examples/frameworks/megatron_core_gpt.py  # on GPUs where there are any

The layer spec names the class of each linear layer; `fused` changes these names and nothing else.
Logits, loss and the gradient of every parameter are compared, with and without sequence parallelism.
Exit code 1 where one differs by more than --tolerance, or where no product was fused.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import (
    initialize_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import mkernel

VOCABULARY, BATCH, SEQUENCE = 128, 2, 32


class FusedColumnParallelLinear(ColumnParallelLinear):
    """Megatron's layer, with its parameters and checkpoints, by mkernel's ops: AllGather+GEMM with
    sequence parallelism, else a product whose gradient is GEMM+AllReduce."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        reduces = self.sequence_parallel or self.allreduce_dgrad
        if gathers or self.explicit_expert_comm or not reduces:
            return super().forward(input_, weight, runtime_gather_output)
        columns = (self.weight if weight is None else weight).t()
        bias, added_later = (None, self.bias) if self.skip_bias_add else (self.bias, None)
        if self.sequence_parallel:  # [sequence / W, batch, hidden]
            y = mkernel.all_gather_gemm(input_, columns, bias=bias, group=self.tp_group)
        else:
            group = mkernel.world(self.tp_group).name
            rows = input_.flatten(0, -2)
            y = torch.ops.mkernel.replicated_gemm(rows, columns, group=group)
            y = y.view(*input_.shape[:-1], -1)
            y = y if bias is None else y + bias
        return y, added_later


class FusedRowParallelLinear(RowParallelLinear):
    """Likewise: GEMM+ReduceScatter with sequence parallelism, else GEMM+AllReduce. The bias is added
    outside of the op, since Megatron itself sums the gradients of biases over ranks."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.explicit_expert_comm or not self.input_is_parallel:
            return super().forward(input_)
        op = mkernel.gemm_reduce_scatter if self.sequence_parallel else mkernel.gemm_all_reduce
        y = op(input_, self.weight.t(), group=self.tp_group)
        if self.skip_bias_add:
            return y, self.bias
        return (y if self.bias is None else y + self.bias), None


def fused(spec: ModuleSpec) -> ModuleSpec:
    """The layer spec with mkernel's layers."""
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp
    mlp = mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]  # of 0.19
    attention.linear_qkv = mlp.linear_fc1 = FusedColumnParallelLinear
    attention.linear_proj = mlp.linear_fc2 = FusedRowParallelLinear
    return spec


class SequenceParallelNorm(torch.nn.LayerNorm):
    """torch's LayerNorm with the mark by which Megatron knows parameters whose gradients are partial.
    Its own norm for sequence parallelism is Apex' or TransformerEngine's."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def gpt(layer: ModuleSpec, *, sequence_parallel: bool) -> GPTModel:
    """A GPT as wide as a test."""
    layer.submodules.input_layernorm = SequenceParallelNorm
    layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=128,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=sequence_parallel,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not torch.cuda.is_available(),
    )
    spec = TransformerBlockSubmodules([layer] * config.num_layers, layer_norm=SequenceParallelNorm)
    model = GPTModel(
        config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE, parallel_output=False
    )
    return model.to(torch.cuda.current_device())


def step(model: GPTModel, tokens: Tensor) -> dict[str, Tensor]:
    """Logits, loss and gradients by name."""
    places = torch.arange(SEQUENCE, device=tokens.device).expand_as(tokens)
    hidden = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=tokens.device).triu(1)
    logits = model(tokens, places, hidden[None, None])
    loss = model(tokens, places, hidden[None, None], labels=tokens).mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"logits": logits.detach(), "loss": loss.detach(), **gradients}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of each, relative norm")
    parser.add_argument("--accelerator", default="streams")
    options = parser.parse_args()

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        parallel_state.initialize_model_parallel(dist.get_world_size())
        model_parallel_cuda_manual_seed(0)
    else:
        # Megatron-Core allocates on the current CUDA device, and draws by the states of its generator.
        torch.cuda.current_device = lambda: torch.device("cpu")
        initialize_rng_tracker(inference_rng_tracker=True)  # keeps no states
        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel(dist.get_world_size())
    group = parallel_state.get_tensor_model_parallel_group()
    mkernel.init(group, accelerator=options.accelerator)

    good = True
    for sequence_parallel in (False, True):
        torch.manual_seed(0)
        own = gpt(get_gpt_layer_local_spec(), sequence_parallel=sequence_parallel)
        for name, parameter in own.named_parameters():
            if name.endswith("bias"):  # Megatron's are 0 at first
                torch.nn.init.normal_(parameter)
        ours = gpt(fused(get_gpt_layer_local_spec()), sequence_parallel=sequence_parallel)
        ours.load_state_dict(own.state_dict())  # Megatron's names and parts
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE)).to(torch.cuda.current_device())
        before = mkernel.stats(group=group).calls
        expected, found = step(own, tokens), step(ours, tokens)
        after = mkernel.stats(group=group).calls
        calls = sorted(name for name in after if after[name] > before.get(name, 0))
        errors = {
            name: float((found[name] - each).norm() / each.norm())
            for name, each in expected.items()
        }
        worst = max(errors, key=errors.get)
        good = good and errors[worst] <= options.tolerance and len(calls) > 0
        print(
            f"rank {dist.get_rank()}, sequence parallel {sequence_parallel}: logits, loss and "
            f"{len(errors) - 2} gradients differ by {errors[worst]:.1e} at most ({worst}); {calls}"
        )
    mkernel.finalize()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
