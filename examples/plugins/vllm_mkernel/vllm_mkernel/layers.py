"""The row-parallel layer: vLLM's own, but for the product and its sum over ranks, which are one op."""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed import get_tp_group, split_tensor_along_last_dim
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.platforms import current_platform

from vllm_mkernel import fusion, ops

logger = init_logger("vllm.mkernel.layers")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_told: set[str] = set()


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
        elif why not in _told:
            _told.add(why)
            logger.warning(
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
    if layer.tp_size == 1:
        return "it is not split over ranks"
    if type(layer.quant_method) is not UnquantizedLinearMethod:
        return f"its weight is quantised ({type(layer.quant_method).__name__})"
    if layer.params_dtype not in _DTYPES:
        return f"its weight is {layer.params_dtype}"
    if envs.VLLM_BATCH_INVARIANT:
        return "results must not depend on the batch (VLLM_BATCH_INVARIANT)"
    if current_platform.is_cpu() or current_platform.device_type not in ("cuda", "cpu"):
        return f"vLLM multiplies in its own way on {current_platform.device_name}"
    if current_platform.is_rocm():
        return "vLLM runs on ROCm"
    if config is None:
        return None
    if config.lora_config is not None:
        return "LoRA adapters are added between the product and the sum"
    if config.parallel_config.use_ubatching:
        return "micro-batches run in threads, whose calls have no common order"
    if config.kernel_config.linear_backend != "auto":
        return f"--linear-backend {config.kernel_config.linear_backend} was asked for"
    return None
