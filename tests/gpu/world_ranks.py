"""What rank processes of test_hopper_world run. Importing it must not touch CUDA: the world chooses the
device of a rank that has not used any."""

from __future__ import annotations

import random
import resource
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore

import mkernel


def symmetric() -> tuple[int, list[float], float]:
    """(device, what every peer's tensor holds, the sum of a tensor after the end of its world)."""
    from mkernel.backends.accelerators.cuda import _kernels

    world = mkernel.world()
    mine = mkernel.empty((3, 1000), torch.bfloat16)
    assert mine.eq(0).all()
    mine.fill_(world.rank + 1)
    torch.cuda.synchronize()
    world.barrier()
    found = []
    stream = torch.cuda.current_stream()
    for peer, address in enumerate(world._membership.engine.heap.everywhere((0, 0))):
        seen = torch.empty_like(mine)
        _kernels.copy(
            seen.data_ptr(), address, seen.nbytes, _kernels.Engine.plain, stream=stream.cuda_stream
        )
        assert seen.eq(peer + 1).all(), f"rank {peer}'s tensor"
        found.append(float(seen[2, 999]))
    device = mine.device.index
    mkernel.finalize()
    return device, found, float(mine.sum(dtype=torch.float32))


def crowded(port: int) -> None:
    """Every rank on device 0."""
    torch.cuda.set_device(0)
    size = mkernel.world().size
    mkernel.finalize()
    mkernel.init(ranks_per_node=size, accelerator="hopper", stores=(_store(port), _store(port)))
    mkernel.empty((8,), torch.float16)


def rounds(port: int) -> list[int]:
    """Free bytes of the device after each of several worlds in one process. A rank's memory is free
    once every rank has let go of it."""
    rank, size, free = mkernel.world().rank, mkernel.world().size, []
    mkernel.finalize()
    store, alarm = _store(port), _store(port)
    for turn in range(4):
        made = mkernel.init(ranks_per_node=size, accelerator="hopper", stores=(store, alarm))
        mkernel.empty((128 << 20,), torch.float16)
        made.barrier()
        mkernel.finalize()
        torch.cuda.empty_cache()
        store.set(f"left/{turn}/{rank}", "")
        store.wait([f"left/{turn}/{other}" for other in range(size)], timedelta(seconds=20))
        free.append(torch.cuda.mem_get_info()[0])
    return free


def _store(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, wait_for_workers=False)


LARGEST, STEP = 512, 8


def after_shapes(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Bytes in use on the device, and by this process on the host, after calls of so many different
    shapes, the largest first; each call's result is looked at."""
    world, draw = mkernel.world(), random.Random(7)
    device = torch.device("cuda", torch.cuda.current_device())
    ones = torch.ones(LARGEST * LARGEST, dtype=torch.bfloat16, device=device)
    results = torch.empty_like(ones)
    wrong = torch.zeros(1, device=device)
    steps = range(STEP, LARGEST + STEP, STEP)
    sizes = {(LARGEST, LARGEST, LARGEST): None}
    while len(sizes) < counts[-1]:
        sizes[draw.choice(steps), draw.choice(steps), draw.choice(steps)] = None
    ops = (mkernel.all_gather_gemm, mkernel.gemm_reduce_scatter, mkernel.gemm_all_reduce)
    found = []
    for number, (m, n, k) in enumerate(sizes, 1):
        op = ops[number % len(ops)]
        gathers, scatters = op is mkernel.all_gather_gemm, op is mkernel.gemm_reduce_scatter
        a = ones[: m * k].view(m, k)[: m // world.size if gathers else m]
        out = results[: m * n].view(m, n)[: m // world.size if scatters else m]
        op(a, ones[: k * n].view(k, n), out=out.fill_(float("nan")))
        wrong += ~(out == (k if gathers else k * world.size)).all()
        if number in counts:
            assert not wrong.item(), f"{wrong.item():.0f} of {number} results are wrong"
            world.barrier()
            free, there = torch.cuda.mem_get_info(device)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            found.append((there - free, pages * resource.getpagesize()))
            world.barrier()
    return found
