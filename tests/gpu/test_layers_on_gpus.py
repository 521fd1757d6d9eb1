"""Tensor-parallel layers on GPUs: results and gradients, eager, compiled, and in CUDA graphs."""

from __future__ import annotations

import layer_ranks
import pytest
from device_buffers import takes_ranks

import mkernel

pytestmark = [takes_ranks(2), pytest.mark.usefixtures("leaves_nothing")]

LIMIT = 0.01
"""Of a relative error: three products in bfloat16 behind one another, each rounded once or twice."""


@pytest.mark.parametrize("mode", layer_ranks.MODES)
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["rows split", "rows whole"])
def test_layers_have_the_results_and_gradients_of_the_unsharded_ones(
    sequence_parallel: bool, mode: str
) -> None:
    for errors in mkernel.launch(
        layer_ranks.trained, mode, sequence_parallel,
        ranks_per_node=2, accelerator="hopper", timeout_s=100,
    ):  # fmt: skip
        assert max(errors.values()) <= LIMIT, errors


@pytest.mark.parametrize("mode", layer_ranks.MODES)
def test_outputs_that_peers_write_in_compiled_layers(mode: str) -> None:
    """32 MiB each, of one plan for forward and backward. Torch's compiler warms CUDA graphs up with
    memory of their own, which outputs must come from then."""
    for errors in mkernel.launch(
        layer_ranks.trained, mode, False, 16384,
        ranks_per_node=2, accelerator="hopper", timeout_s=100,
    ):  # fmt: skip
        assert max(errors.values()) <= LIMIT, errors
