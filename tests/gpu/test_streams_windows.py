"""`streams` on GPUs that map each other's memory: puts by copy engines."""

from __future__ import annotations

from typing import Any

import kept_ranks
import pytest
import streams_ranks
import torch
from device_buffers import needs_gpus, several, takes_ranks
from hopper_ranks import OPS, Shape
from in_world import TOLD_S

import mkernel

pytestmark = [takes_ranks(2), pytest.mark.usefixtures("leaves_nothing")]


def ranks(world: int, function: Any, *arguments: Any) -> list[Any]:
    return kept_ranks.run(function, *arguments, ranks_per_node=world, accelerator="streams")


@pytest.mark.parametrize(
    "world", [pytest.param(count, marks=needs_gpus(count)) for count in (2, 4)]
)
@pytest.mark.parametrize("copies", [0, 1])
def test_the_setting_chooses_who_moves_the_bytes(
    world: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without copies NCCL does, which takes no two ranks on a device."""
    monkeypatch.setenv("MKERNEL_STREAMS_COPIES", str(copies))
    shapes = [Shape(op, 512, 264, 320) for op in OPS]
    puts = (1 + 1 + 2) * (world - 1) * copies
    assert ranks(world, streams_ranks.counted, shapes) == [([], puts)] * world


@several
def test_without_waits_results_are_wrong(world: int) -> None:
    found = mkernel.launch(
        streams_ranks.hasty, Shape("all_gather_gemm", 4096, 512, 4096), 12, ranks_per_node=world,
        accelerator="streams", timeout_s=TOLD_S,
    )  # fmt: skip
    assert sum(found) > 0


@needs_gpus(2)
@several
def test_symmetric_memory_lies_on_the_device(world: int) -> None:
    for rank, (device, error, told) in enumerate(ranks(world, streams_ranks.own_tensors)):
        assert device == f"cuda:{rank % torch.cuda.device_count()}"
        assert error == 0
        assert "a.device" in told
        assert device in told
