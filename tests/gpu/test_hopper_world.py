"""Worlds on GPUs before any kernel of an op: devices, symmetric tensors, what the end leaves."""

from __future__ import annotations

import os

import pytest
import torch
from device_buffers import needs_gpus

import mkernel
from mkernel.errors import MkernelError

pytestmark = [needs_gpus(2), pytest.mark.usefixtures("leaves_nothing")]
several = pytest.mark.parametrize("world", [2, pytest.param(4, marks=needs_gpus(4))])


def symmetric() -> tuple[int, list[float], float]:
    """(device, what every peer's tensor holds, the sum of a tensor after the end of its world)."""
    from mkernel.backends.accelerators.hopper import _hopper

    world = mkernel.world()
    mine = mkernel.empty((3, 1000), torch.bfloat16)
    assert mine.eq(0).all()
    mine.fill_(world.rank + 1)
    torch.cuda.synchronize()
    world.barrier()
    found = []
    stream = torch.cuda.current_stream()
    for peer, address in enumerate(world._everywhere(world._users[0], 0)):
        seen = torch.empty_like(mine)
        _hopper.copy(
            seen.data_ptr(), address, seen.nbytes, _hopper.Engine.plain, stream=stream.cuda_stream
        )
        assert seen.eq(peer + 1).all(), f"rank {peer}'s tensor"
        found.append(float(seen[2, 999]))
    device = mine.device.index
    mkernel.finalize()
    return device, found, float(mine.sum(dtype=torch.float32))


@several
def test_tensors_of_every_rank_are_mapped_and_outlive_the_world(world: int) -> None:
    results = mkernel.launch(symmetric, ranks_per_node=world, accelerator="hopper", timeout_s=30)
    for rank, (device, found, total) in enumerate(results):
        assert device == rank
        assert found == [peer + 1.0 for peer in range(world)]
        assert total == 3000.0 * (rank + 1)


def crowded() -> None:
    torch.cuda.set_device(0)  # the mistake: this rank's device was another one
    world = mkernel.world()
    options = {"accelerator": "hopper", "stores": (world._store, world._store)}
    mkernel.finalize()
    mkernel.init(ranks_per_node=world.size, **options)  # type: ignore[arg-type]
    mkernel.empty((8,), torch.float16)


def test_ranks_that_share_a_device_are_told() -> None:
    with pytest.raises(MkernelError, match="a GPU of its own for each rank"):
        mkernel.launch(crowded, ranks_per_node=2, accelerator="hopper", timeout_s=20)


def rounds() -> list[int]:
    """Free bytes of the device after each of several worlds in one process."""
    world = mkernel.world()
    store, size, free = world._store, world.size, []
    mkernel.finalize()
    for _ in range(4):
        made = mkernel.init(ranks_per_node=size, accelerator="hopper", stores=(store, store))
        mkernel.empty((128 << 20,), torch.float16)
        made.barrier()
        mkernel.finalize()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    return free


def test_worlds_in_turn_leave_no_memory() -> None:
    for free in mkernel.launch(rounds, ranks_per_node=2, accelerator="hopper", timeout_s=30):
        assert min(free[1:]) >= free[0] - (64 << 20)


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(MkernelError, match="ranks_per_node"):
        mkernel.launch(
            os.getpid, ranks_per_node=torch.cuda.device_count() + 1, accelerator="hopper"
        )
