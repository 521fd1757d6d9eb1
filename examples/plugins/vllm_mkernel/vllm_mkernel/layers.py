"""The row-parallel layer: vLLM's own, but for the product and its sum over ranks, which are one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed import get_tp_group, split_tensor_along_last_dim
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.platforms import current_platform

from vllm_mkernel import fusion, ops

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class FusedRowParallelLinear(RowParallelLinear):
    """Takes the place of every ``RowParallelLinear``. Parameters, their loading and all that is not
    taken (:func:`refusal`) are vLLM's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        config = get_current_vllm_config_or_none()
        why = refusal(self, config)
        self.group_name = None if why else ops.join(get_tp_group())
        if why is None:
            fusion.install(config)
        else:
            ops.warn_once(
                why,
                "%s stays vLLM's own, and so do all other layers for this reason: %s",
                self.prefix or "a row-parallel layer",
                why,
            )

    def forward(self, input_: Tensor) -> Any:
        """Multiply and sum over ranks: input [..., K_r], or [..., K] where it is not split yet, to
        [..., N]. What is returned beside it is vLLM's matter, as ``RowParallelLinear`` says."""
        if self.group_name is None or not self.reduce_results:
            return super().forward(input_)
        if not self.input_is_parallel:
            input_ = split_tensor_along_last_dim(input_, num_partitions=self.tp_size)[self.tp_rank]
        added, kept = (None, self.bias) if self.skip_bias_add else (self.bias, None)
        output = ops.GEMM_ALL_REDUCE(input_, self.weight.t(), added, self.group_name)
        return (output, kept) if self.return_bias else output


def refusal(layer: RowParallelLinear, config: VllmConfig | None) -> str | None:
    """Return why a layer must stay vLLM's own, in words; None: it need not."""
    method, platform = type(layer.quant_method), current_platform
    reasons = {
        "it is not split over ranks": layer.tp_size == 1,
        f"its weight is quantised ({method.__name__})": method is not UnquantizedLinearMethod,
        f"its weight is {layer.params_dtype}": layer.params_dtype not in _DTYPES,
        "results must not depend on the batch (VLLM_BATCH_INVARIANT)": envs.VLLM_BATCH_INVARIANT,
        f"vLLM runs on {platform.device_name}, with products of its own": platform.is_rocm()
        or platform.is_cpu()
        or platform.device_type not in ("cuda", "cpu"),
    }
    if config is not None:
        backend = config.kernel_config.linear_backend
        threads = config.parallel_config.use_ubatching
        reasons |= {
            "LoRA adapters are added between product and sum": config.lora_config is not None,
            "micro-batches run in threads, whose calls have no common order": threads,
            f"--linear-backend {backend} was asked for": backend != "auto",
        }
    return next((why for why, holds in reasons.items() if holds), None)
