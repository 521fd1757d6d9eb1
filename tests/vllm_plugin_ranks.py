"""One rank of the test of the plug-in for vLLM, which ``tests/vllm_plugin.py`` starts in an environment
with vLLM's Python.

vLLM's own loader finds the plug-in, and vLLM's own layers, weight loaders, groups and compiler run.
Only the platform is a stand-in: an out-of-tree one, as vLLM calls it, whose device is the CPU and whose
collectives are gloo's. Each result is compared with float64, and so is that of vLLM's own layer with
the same weights; what mkernel was called for is counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import vllm.platforms
from torch import Tensor, nn
from vllm.platforms.interface import Platform, PlatformEnum

import mkernel

LIMITS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # relative, of norms
HIDDEN, INNER, TOKENS, EPS = 64, 96, 26, 1e-5
SPLIT = 2  # ranks of a tensor parallel group


class StandIn(Platform):
    """CPUs that vLLM treats like a device of its own: collectives are custom ops there, as on GPUs."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        return True


vllm.platforms.current_platform = StandIn()
# vLLM's last compiler pass looks this op of its CUDA binary up; nothing here calls it.
BINARY = torch.library.Library("_C", "FRAGMENT")
BINARY.define("rotary_embedding(Tensor x) -> Tensor")

from vllm.compilation.decorators import support_torch_compile  # noqa: E402
from vllm.compilation.passes.inductor_pass import CallableInductorPass  # noqa: E402
from vllm.compilation.passes.vllm_inductor_pass import get_match_table  # noqa: E402
from vllm.config import (  # noqa: E402
    CompilationConfig,
    CompilationMode,
    CUDAGraphMode,
    LoRAConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import (  # noqa: E402
    get_tp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_reduce_scatter,
)
from vllm.distributed import parallel_state as state  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.custom_op import op_registry_oot  # noqa: E402
from vllm.model_executor.layers.activation import SiluAndMul  # noqa: E402
from vllm.model_executor.layers.layernorm import RMSNorm  # noqa: E402
from vllm.model_executor.layers.linear import (  # noqa: E402
    MergedColumnParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402

generator = torch.Generator()


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw a tensor, the same on every rank."""
    return torch.randn(shape, generator=generator).to(dtype)


def close(name: str, found: Tensor, expected: Tensor) -> None:
    """Compare with float64."""
    assert found.shape == expected.shape, (name, found.shape, expected.shape)
    error = float((found.double() - expected).norm() / expected.norm())
    assert error <= LIMITS[found.dtype], f"{name}: {error:.1e} from float64, in {found.dtype}"


def calls(op: str) -> int:
    """Count the calls of an op that this rank has made so far."""
    return mkernel.stats().calls.get(op, 0)


@contextlib.contextmanager
def counted(**wanted: int) -> Iterator[None]:
    """Check how many calls of each op are made meanwhile."""
    before = {op: calls(op) for op in wanted}
    yield
    made = {op: calls(op) - before[op] for op in wanted}
    assert made == wanted, f"calls of mkernel: {made}, not {wanted}"


class Warnings(logging.Handler):
    """Keeps what the plug-in has warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("vllm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("vllm.mkernel"):
            self.messages.append(record.getMessage())

    def take(self) -> list[str]:
        """Return the warnings since the last look."""
        found, self.messages = self.messages, []
        return found


@contextlib.contextmanager
def vllms_own() -> Iterator[None]:
    """Make layers of vLLM's own class meanwhile."""
    plugged = op_registry_oot.pop("RowParallelLinear")
    try:
        yield
    finally:
        op_registry_oot["RowParallelLinear"] = plugged


def load(layer: nn.Module, **full: Tensor) -> None:
    """Load unsharded parameters by vLLM's own loaders."""
    for name, value in full.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, value)


def loading(layer: nn.Module) -> list[tuple[Any, ...]]:
    """Describe what checkpoints are loaded into, and by what."""
    return [
        (name, type(each), each.shape, each.dtype, each.weight_loader.__func__)
        for name, each in layer.named_parameters()
    ]


# ---- what is checked -----------------------------------------------------------------------------


def check_versions(told: Warnings) -> None:
    """Another version of vLLM, and another plug-in's layer, are left as they are, by name."""
    import vllm_mkernel

    known = vllm_mkernel.__version_tuple__
    vllm_mkernel.__version_tuple__ = (0, 34, 1)
    vllm_mkernel.register()
    vllm_mkernel.__version_tuple__ = known
    (message,) = told.take()
    assert all(word in message for word in ("0.33", "0.34.1")), message
    assert not op_registry_oot

    class Theirs(RowParallelLinear):
        """The layer of another plug-in."""

    RowParallelLinear.register_oot(Theirs)
    vllm_mkernel.register()
    (message,) = told.take()
    assert "Theirs" in message, message
    assert op_registry_oot.pop("RowParallelLinear") is Theirs


def check_loader(told: Warnings) -> type:
    """VLLM's own loader finds the installed plug-in, which may be called again."""
    load_general_plugins()
    plugged = op_registry_oot["RowParallelLinear"]
    package = Path(sys.modules[plugged.__module__].__file__ or "")
    assert "site-packages" in package.parts, f"{package} is not the installed plug-in"
    sys.modules["vllm_mkernel"].register()
    assert told.take() == []
    return plugged


def check_row_parallel(plugged: type) -> None:
    """The layer beside vLLM's own, with the same weights."""
    rank, ranks = get_tp_group().rank_in_group, get_tp_group().world_size
    cases = [
        (dtype, bias, skip, split, lead)
        for dtype in LIMITS
        for bias, skip in ((False, False), (True, False), (True, True))
        for split in (True, False)
        for lead in ((TOKENS,), (1,), (2, 5))
    ]
    for dtype, bias, skip, split, lead in cases:
        options = {
            "bias": bias, "skip_bias_add": skip, "input_is_parallel": split, "params_dtype": dtype,
        }  # fmt: skip
        layer = RowParallelLinear(INNER, HIDDEN, prefix="fused", **options)
        assert type(layer) is plugged
        with vllms_own():
            own = RowParallelLinear(INNER, HIDDEN, prefix="own", **options)
        assert type(own) is RowParallelLinear
        assert loading(layer) == loading(own)
        full = {"weight": drawn(HIDDEN, INNER, dtype=dtype) / INNER**0.5}
        full |= {"bias": drawn(HIDDEN, dtype=dtype)} if bias else {}
        for each in (layer, own):
            load(each, **full)
        x = drawn(*lead, INNER, dtype=dtype)
        added = full["bias"].double() if bias and not skip else None
        expected = F.linear(x.double(), full["weight"].double(), added)
        given = x.chunk(ranks, dim=-1)[rank].contiguous() if split else x
        for each, launches in ((layer, 1), (own, 0)):
            with counted(gemm_all_reduce=launches):
                found, kept = each(given.clone())
            close(f"{type(each).__name__} {options} {lead}", found, expected)
            assert (kept is not None) == (bias and skip)


def check_refusals(told: Warnings) -> None:
    """What is not taken stays vLLM's own, with right results and one warning a cause."""

    class Method(UnquantizedLinearMethod):
        """A method of somebody's quantisation."""

    class Quantisation(QuantizationConfig):
        """A quantisation whose method is its own."""

        get_name = get_supported_act_dtypes = get_min_capability = get_config_filenames = None
        from_config = None

        def get_quant_method(self, layer: nn.Module, prefix: str) -> Method:
            return Method()

    plain, lora, threads, chosen = (VllmConfig() for _ in range(4))
    lora.lora_config = LoRAConfig(max_lora_rank=8)  # which vLLM checks against a whole model before
    threads.parallel_config.enable_dbo = True
    chosen.kernel_config.linear_backend = "flashinfer_cutlass"
    cases: list[tuple[str, VllmConfig, dict[str, Any]]] = [
        ("not split", plain, {"disable_tp": True}),
        ("Method", plain, {"quant_config": Quantisation()}),
        ("float64", plain, {"params_dtype": torch.float64}),
        ("BATCH_INVARIANT", plain, {}),
        ("LoRA", lora, {}),
        ("micro-batches", threads, {}),
        ("linear-backend", chosen, {}),
    ]
    for word, config, options in cases:
        os.environ["VLLM_BATCH_INVARIANT"] = str(int(word == "BATCH_INVARIANT"))
        with set_current_vllm_config(config):
            layers = [
                RowParallelLinear(INNER, HIDDEN, bias=False, prefix=f"{word}.{at}", **options)
                for at in range(2)
            ]
        (message,) = told.take()
        assert all(each in message for each in (word, f"{word}.0")), message
        weight = drawn(HIDDEN, INNER, dtype=layers[0].weight.dtype)
        load(layers[1], weight=weight)
        x = drawn(TOKENS, INNER, dtype=weight.dtype)
        given = x.chunk(layers[1].tp_size, dim=-1)[layers[1].tp_rank].contiguous()
        with counted(gemm_all_reduce=0):
            found, _ = layers[1](given)
        error = (found.double() - x.double() @ weight.double().t()).norm() / found.norm()
        assert error < 1e-5, (word, error)
    os.environ["VLLM_BATCH_INVARIANT"] = "0"

    passes = VllmConfig()  # with a pass of the user's
    theirs = CallableInductorPass(print, uuid="theirs")
    passes.compilation_config.inductor_compile_config[StandIn().pass_key] = theirs
    with set_current_vllm_config(passes):
        RowParallelLinear(INNER, HIDDEN, bias=False)
    (message,) = told.take()
    assert "CallableInductorPass" in message, message
    assert passes.compilation_config.inductor_compile_config[StandIn().pass_key] is theirs

    layer = RowParallelLinear(INNER, HIDDEN, bias=False)  # and a call that mkernel does not take
    for _ in range(2):
        found, _ = layer(torch.empty(0, layer.input_size_per_partition))
        assert found.shape == (0, HIDDEN)
    (message,) = told.take()
    assert "does not take a call of gemm_all_reduce" in message, message


class Half(nn.Module):
    """Norm and MLP, or norm, gather, MLP and scatter, as vLLM's models write them."""

    def __init__(self, scattered: bool, prefix: str) -> None:
        super().__init__()
        self.scattered = scattered
        self.norm = RMSNorm(HIDDEN, EPS)
        self.up = MergedColumnParallelLinear(
            HIDDEN, [INNER, INNER], bias=True, prefix=f"{prefix}.up"
        )
        self.act = SiluAndMul()
        self.down = RowParallelLinear(
            INNER, HIDDEN, bias=False, reduce_results=not scattered, prefix=f"{prefix}.down"
        )

    def forward(self, x: Tensor, residual: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        x, residual = self.norm(x, residual)
        if self.scattered:
            x = tensor_model_parallel_all_gather(x, 0)[:tokens]
        x, _ = self.down(self.act(self.up(x)[0]))
        if self.scattered:
            x = F.pad(x, (0, 0, 0, -x.shape[0] % get_tp_group().world_size))
            x = tensor_model_parallel_reduce_scatter(x, 0)
        return x, residual


class Model(nn.Module):
    """Two halves and a last norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", scattered: bool) -> None:
        super().__init__()
        self.halves = nn.ModuleList(Half(scattered, f"{prefix}halves.{at}") for at in range(2))
        self.norm = RMSNorm(HIDDEN, EPS)

    def forward(self, x: Tensor, residual: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        for each in self.halves:
            x, residual = each(x, residual, positions.shape[0])
        return self.norm(x, residual)


@support_torch_compile(dynamic_arg_dims={"x": 0, "residual": 0, "positions": 0})
class Whole(Model):
    """Every rank has all tokens."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, scattered=False)


@support_torch_compile(dynamic_arg_dims={"x": 0, "residual": 0, "positions": 0})
class Scattered(Model):
    """Every rank has its part of the tokens outside of attention and MLP."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, scattered=True)


def check_compiled(kind: type, dtype: torch.dtype, **launches: int) -> None:
    """A model that vLLM compiles: the pass takes norms, gathers and scatters."""
    torch.set_default_dtype(dtype)
    tp = get_tp_group()
    rank, ranks = tp.rank_in_group, tp.world_size
    config = VllmConfig(
        parallel_config=ParallelConfig(tensor_parallel_size=1),
        compilation_config=CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE,
            cudagraph_mode=CUDAGraphMode.NONE,
            compile_sizes=[],
        ),
    )
    before = get_match_table()
    with set_current_vllm_config(config):
        model = kind(vllm_config=config, prefix=kind.__name__)
    full = []
    for half in model.halves:
        shapes = (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
        gate, up, down = (drawn(*shape, dtype=dtype) / 8 for shape in shapes)
        biases = [drawn(INNER, dtype=dtype) for _ in range(2)]
        for shard, values in enumerate(zip((gate, up), biases, strict=True)):
            for parameter, value in zip((half.up.weight, half.up.bias), values, strict=True):
                parameter.weight_loader(parameter, value, shard)
        load(half.down, weight=down)
        full.append([each.double() for each in (gate, up, down, *biases)])
    norms = [half.norm for half in model.halves] + [model.norm]
    for norm in norms:
        norm.weight.data.copy_(1 + drawn(HIDDEN, dtype=dtype) / 8)
    for tokens in (TOKENS, TOKENS, TOKENS + 1, 7):  # also where ranks do not divide them
        x, residual = (drawn(tokens, HIDDEN, dtype=dtype) for _ in "xr")

        def part(whole: Tensor) -> Tensor:
            padded = F.pad(whole, (0, 0, 0, -len(whole) % ranks))
            return padded.chunk(ranks)[rank].clone() if kind is Scattered else whole.clone()

        total, y = residual.double(), x.double()
        for norm, (gate, up, down, *biases) in zip(norms, full, strict=False):
            total = total + y
            rows = F.rms_norm(total, (HIDDEN,), norm.weight.data.double(), EPS)
            gates, ups = F.linear(rows, gate, biases[0]), F.linear(rows, up, biases[1])
            y = (F.silu(gates) * ups) @ down.t()
        total = total + y
        expected = F.rms_norm(total, (HIDDEN,), norms[-1].weight.data.double(), EPS), total
        with counted(**launches), set_forward_context(None, config, num_tokens=tokens):
            found = [each.detach() for each in model(part(x), part(residual), torch.arange(tokens))]
        shard = len(part(x))
        real = min(shard, tokens - rank * shard) if kind is Scattered else tokens
        for name, one, other in zip(("rows", "residual"), found, expected, strict=True):
            close(f"{kind.__name__} {tokens} {name}", one[:real], part(other)[:real])
    made = {name: count - before.get(name, 0) for name, count in get_match_table().items()}
    fused = ("mkernel_gather", "mkernel_scatter") if kind is Scattered else ("mkernel_norm",)
    wanted = dict.fromkeys(fused, 2)
    assert {name: count for name, count in made.items() if count} == wanted, made


def main() -> None:
    torch.manual_seed(0)
    generator.manual_seed(62)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    told = Warnings()
    check_versions(told)
    plugged = check_loader(told)
    with set_current_vllm_config(VllmConfig()):
        state.init_distributed_environment(
            ranks, rank, "env://", rank, "gloo", timeout=timedelta(seconds=120)
        )
        state.initialize_model_parallel(SPLIT, ranks // SPLIT)
        try:
            check_row_parallel(plugged)
            check_refusals(told)
            check_compiled(Whole, torch.float32, gemm_all_reduce=2)
            check_compiled(Whole, torch.bfloat16, gemm_all_reduce=2)
            check_compiled(Scattered, torch.float32, all_gather_gemm=2, gemm_reduce_scatter=2)
            assert told.take() == []
        finally:
            mkernel.finalize()
            state.destroy_model_parallel()
            state.destroy_distributed_environment()
    print(f"rank {rank} of {ranks}: vLLM {vllm.__version__}, right")


if __name__ == "__main__":
    main()
