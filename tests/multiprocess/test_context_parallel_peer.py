"""torch's context parallelism as the benchmark's peer, on CPU ranks: torch's attention for CPUs stands
in for cuDNN's."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mkernel
from mkernel.cases import case_of
from mkernel.harness.contenders.context_parallel import ContextParallel, ContextParallelAllToAll
from mkernel.harness.problem import Inputs, Problem

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

SIZES = {"batch": 1, "heads": 4, "kv_heads": 2, "sequence": 128, "head_dim": 16}
_aten = torch.ops.aten


def _groups(q: Tensor, *given: Tensor) -> list[Tensor]:
    return [each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in given]


def forward(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Sequence[Any]:
    """As cuDNN's: with a log-sum-exp [B, H, R, 1]."""
    key, value = _groups(query, key, value)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, options["is_causal"]
    )
    return out, lse[..., None]


def backward(
    *, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    is_causal: bool, **options: Any,
) -> Sequence[Tensor]:  # fmt: skip
    groups = query.shape[1] // key.shape[1]
    key, value = _groups(query, key, value)
    of_q, *of_kv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp[..., 0], 0.0, is_causal
    )
    return of_q, *(each.unflatten(1, (-1, groups)).sum(2) for each in of_kv)


def errors(op: str) -> list[str]:
    """What is wrong with any rotation, causal or not."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    _attention.aten = SimpleNamespace(
        _scaled_dot_product_cudnn_attention=forward,
        _scaled_dot_product_cudnn_attention_backward=SimpleNamespace(default=backward),
    )
    world = mkernel.world()
    found = []
    for causal in (False, True):
        case = case_of(op)({**SIZES, "causal": causal}, "float32", "float32")
        problem = Problem(case, world.rank, world.size, torch.device("cpu"))
        for kind in (ContextParallel, ContextParallelAllToAll):
            peer, inputs = kind(problem), Inputs()
            problem.fill("op", inputs, 3)
            peer.before(inputs)
            results = peer.judged(peer.call(inputs, {}), inputs)
            compared = problem.compared("op", results, 3, peer.promised())
            limits = peer.limits()
            found += [
                f"{kind.name} causal={causal}: {name} {one.error} {one.why}"
                for name, one in compared.items()
                if not one.error <= limits[name]
            ]
            assert compared
    return found


@pytest.mark.parametrize("op", ["ring_attention", "ring_attention_backward"])
def test_both_rotations_are_right(op: str) -> None:
    assert mkernel.launch(errors, op, ranks_per_node=2, accelerator="streams") == [[], []]
