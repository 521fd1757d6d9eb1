"""Models that people have, on two GPUs: tensor parallelism beside data parallelism of one rank, and the
other way round. Results and gradients are the unsharded model's, by fused ops."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_buffers import needs_gpus
from model_on_gpus_ranks import DEADLINE_S, FAULT, steps

import mkernel

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [needs_gpus(2), pytest.mark.usefixtures("leaves_nothing")]

# An embedding is split by some versions of transformers alone.
CALLED = {
    "llama": {"gemm_all_reduce"},
    "qwen3_moe": {"gemm_all_reduce", "moe_dispatch_gemm", "moe_gemm_combine"},
    "torchtitan": {"all_gather_gemm", "gemm_reduce_scatter"},
}


@pytest.mark.parametrize("tensor_parallel", [2, 1])
def test_training_steps_are_the_unsharded_ones(tensor_parallel: int, tmp_path: Path) -> None:
    # NCCL lets no ranks share a GPU.
    ranks = mkernel.launch(
        steps, str(tmp_path), tensor_parallel,
        ranks_per_node=2, accelerator="hopper", timeout_s=DEADLINE_S,
    )  # fmt: skip
    for found in ranks:
        assert len(found) == (7 if tensor_parallel == 2 else 3)
        for name, each in found.items():
            if name == FAULT:
                assert each.wrong
                continue
            assert not each.wrong, f"{name}: more than {each.allowed:.1e}: {each.wrong}"
            assert len(each.errors) > 12, name
            assert {*each.calls} >= CALLED[name.split(",")[0]], f"{name}: {each.calls}"
