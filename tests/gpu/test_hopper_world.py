"""Worlds on GPUs before any kernel of an op: devices, symmetric tensors, what the end leaves."""

from __future__ import annotations

import os

import pytest
import torch
import world_ranks
from device_buffers import needs_gpus, several, takes_ranks
from in_world import TOLD_S

import mkernel
from mkernel.errors import MkernelError
from mkernel.launch import host_store

pytestmark = [takes_ranks(2), pytest.mark.usefixtures("leaves_nothing")]


@several
def test_tensors_of_every_rank_are_mapped_and_outlive_the_world(world: int) -> None:
    results = mkernel.launch(
        world_ranks.symmetric, ranks_per_node=world, accelerator="hopper", timeout_s=TOLD_S
    )
    for rank, (device, found, total) in enumerate(results):
        assert device == rank % torch.cuda.device_count()
        assert found == [peer + 1.0 for peer in range(world)]
        assert total == 3000.0 * (rank + 1)


@needs_gpus(2)
def test_ranks_that_share_a_device_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKERNEL_RANKS_PER_DEVICE", raising=False)
    _store, port = host_store(2, TOLD_S)
    with pytest.raises(MkernelError, match="a GPU of its own for each rank"):
        mkernel.launch(
            world_ranks.crowded, port, ranks_per_node=2, accelerator="hopper", timeout_s=20
        )


@pytest.mark.alone
def test_worlds_in_turn_leave_no_memory() -> None:
    _store, port = host_store(2, TOLD_S)
    for free in mkernel.launch(
        world_ranks.rounds, port, ranks_per_node=2, accelerator="hopper", timeout_s=TOLD_S
    ):
        assert min(free[1:]) >= free[0] - (64 << 20)


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKERNEL_RANKS_PER_DEVICE", raising=False)
    with pytest.raises(MkernelError, match="ranks_per_node"):
        mkernel.launch(
            os.getpid, ranks_per_node=torch.cuda.device_count() + 1, accelerator="hopper"
        )


@pytest.mark.alone
def test_memory_does_not_grow_with_the_shapes_met() -> None:
    """What the host keeps of shapes is that of the last 1024 to 2048."""
    for first, *later in mkernel.launch(
        world_ranks.after_shapes, (1000, 4000, 20_000), ranks_per_node=2, accelerator="hopper",
        timeout_s=TOLD_S,
    ):  # fmt: skip
        for device, host in later:
            assert device - first[0] <= 32 << 20
            assert host - first[1] <= 64 << 20
        assert later[1][1] - later[0][1] <= 8 << 20
