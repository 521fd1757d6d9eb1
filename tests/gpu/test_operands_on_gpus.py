"""Strided operands, activations, biases, several b on GPUs; a world of ``hopper`` and ``streams``."""

from __future__ import annotations

import kept_ranks
import operand_ranks
import pytest
from device_buffers import needs_gpus, takes_ranks
from operand_forms import OPS

pytestmark = [takes_ranks(2), pytest.mark.usefixtures("leaves_nothing")]


@pytest.mark.parametrize("accelerator", ["hopper", "streams"])
@pytest.mark.parametrize("path", ["fused", "library"])
@pytest.mark.parametrize("op", OPS)
def test_every_form_has_the_values_and_gradients_of_the_unsharded_product(
    op: str, path: str, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if accelerator == "streams" and path == "library":
        pytest.skip("streams has no library path")
    monkeypatch.setenv("MKERNEL_PATH", path)
    found = kept_ranks.run(operand_ranks.called, op, ranks_per_node=2, accelerator=accelerator)
    assert found == [[], []]


paths = pytest.mark.parametrize("path", ["fused", "library"])


@paths
@pytest.mark.parametrize("op", OPS)
def test_kernels_read_parts_of_larger_matrices(
    op: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_PATH", path)
    assert kept_ranks.run(
        operand_ranks.strided, op, path, ranks_per_node=2, accelerator="hopper"
    ) == [[], []]


@paths
@pytest.mark.parametrize("op", OPS)
def test_a_bias_is_added_before_the_only_rounding(
    op: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_PATH", path)
    views = ("pipelined", "sequential") if path == "fused" else ("pipelined",)
    assert kept_ranks.run(
        operand_ranks.rounded_once, op, views, ranks_per_node=2, accelerator="hopper"
    ) == [[], []]


@pytest.mark.parametrize("accelerator", ["hopper", "streams"])
def test_several_products_of_one_gather(accelerator: str) -> None:
    for errors in kept_ranks.run(operand_ranks.several, ranks_per_node=2, accelerator=accelerator):
        assert errors[0] == 0
        assert max(errors) <= 3e-3


@needs_gpus(2)  # NCCL, which carries streams' part, has no two ranks share one
def test_a_world_runs_each_op_on_what_has_it() -> None:
    for found in kept_ranks.run(
        operand_ranks.whole_model, ranks_per_node=2, accelerator="hopper,streams"
    ):
        assert {name.split(maxsplit=1)[1] for name in found} == {
            "hopper product of torch.bfloat16",
            "streams product of torch.float32",
            "hopper torch.bfloat16",
            "streams torch.float32",
        }
        assert max(found.values()) <= 1e-2, found
