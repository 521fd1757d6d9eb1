"""The library path's collectives alone: time a call by size, GPUs of one process.

    python bench/collectives.py [--world 4] [--repeat 9]

Every rank replays a CUDA graph of many calls at the same time; a call's time is the slowest rank's
over their number, the median over repeats, so launches from the host are not in it. Rates are what a
rank sends: (W - 1) / W of the bytes for all_gather and reduce_scatter, twice that for all_reduce.
Correctness is tests/gpu/test_collectives.py's business. Bar: all_reduce of 1 MiB in 10 us.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import results_file
import torch

from mkernel.backends.accelerators.hopper import _hopper
from mkernel.harness.provenance import devices

MIB = 1 << 20
SIZES = [1 << (2 * i) for i in range(6, 15)]  # 4 KiB to 256 MiB: bytes of the whole
DATA = 1 << 20  # offset of a region's data
DEADLINE_S = 20.0
BAR_US = {("all_reduce", MIB): 10.0}
WAYS = {  # op, way, symmetric outs, largest size
    "all_gather": ("all_gather", "", False, 256 * MIB),
    "all_gather symmetric": ("all_gather", "", True, 256 * MIB),
    "reduce_scatter": ("reduce_scatter", "", False, 256 * MIB),
    "all_reduce one-shot": ("all_reduce", "one_shot", False, 16 * MIB),
    "all_reduce two-shot": ("all_reduce", "two_shot", False, 256 * MIB),
    "all_reduce two-shot symmetric": ("all_reduce", "two_shot", True, 256 * MIB),
}


class Shared:
    """Zeroed memory on every rank's GPU, mapped on all of them."""

    def __init__(self, world: int, nbytes: int) -> None:
        self.own = [_hopper.DeviceMemory.create(rank, nbytes) for rank in range(world)]
        self.mapped = [
            [self._attach(self.own[of], of, rank) for of in range(world)] for rank in range(world)
        ]

    @staticmethod
    def _attach(memory: _hopper.DeviceMemory, owner: int, device: int) -> _hopper.DeviceMemory:
        if owner == device:
            return memory
        fd = memory.export_fd()
        try:
            return _hopper.DeviceMemory.attach(device, fd, memory.mapped_bytes)
        finally:
            os.close(fd)

    def addresses(self, rank: int) -> list[int]:
        """Of every rank's, for kernels of ``rank``."""
        return [memory.address for memory in self.mapped[rank]]


class Ranks:
    """What all calls use."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.staging_bytes = 2 * max(SIZES) + MIB
        self.regions = Shared(world, DATA + self.staging_bytes)
        for region in self.regions.own:
            region.write_word(0, 1)  # the epoch
        self.outs = Shared(world, max(SIZES))
        self.private = [
            torch.empty(max(SIZES), dtype=torch.uint8, device=f"cuda:{r}") for r in range(world)
        ]
        self.sources = [
            torch.randn(max(SIZES) // 2, dtype=torch.bfloat16, device=f"cuda:{r}")
            for r in range(world)
        ]
        self.controls = [_hopper.ControlBlock() for _ in range(world)]
        self.streams = [torch.cuda.Stream(rank) for rank in range(world)]

    def launch(self, rank: int, which: str, nbytes: int) -> None:
        """One call on the current stream."""
        op, way, symmetric, _ = WAYS[which]
        call = _hopper.Collective(
            bases=self.regions.addresses(rank),
            rank=rank,
            control=self.controls[rank].address,
            timeout_ns=int(DEADLINE_S * 1e9),
            number=1,
            staging=0,
            staging_bytes=self.staging_bytes,
        )
        source = self.sources[rank].data_ptr()
        out = self.outs.addresses(rank) if symmetric else [self.private[rank].data_ptr()]
        stream = torch.cuda.current_stream(rank).cuda_stream
        if op == "all_gather":
            _hopper.all_gather(call, source, nbytes // self.world, out, stream)
        elif op == "reduce_scatter":
            part = nbytes // 2 // self.world
            _hopper.reduce_scatter(call, _hopper.Element.bfloat16, source, part, out[0], stream)
        else:
            element, kind = _hopper.Element.bfloat16, getattr(_hopper.Way, way)
            _hopper.all_reduce(call, element, source, nbytes // 2, out, kind, stream)

    def each(self, run: Callable[[int], object]) -> None:
        for rank in range(self.world):
            with torch.cuda.device(rank), torch.cuda.stream(self.streams[rank]):
                run(rank)

    def finish(self) -> None:
        """Kernels end by themselves at the deadline."""
        end = time.monotonic() + DEADLINE_S + 10
        for rank, stream in enumerate(self.streams):
            while not stream.query():
                if time.monotonic() > end:
                    raise RuntimeError(f"rank {rank}: a kernel does not end")
                time.sleep(0.0001)
            code, who = self.controls[rank].outcome()
            if code.name != "none":
                raise RuntimeError(f"rank {rank} waited in vain for rank {who.peer}")


def measure(ranks: Ranks, which: str, nbytes: int, repeat: int) -> float:
    """Microseconds a call."""
    calls = max(4, min(100, 64 * MIB // nbytes))
    ranks.each(lambda rank: ranks.launch(rank, which, nbytes))  # loads the kernel
    ranks.finish()
    graphs = []
    for rank in range(ranks.world):
        graph = torch.cuda.CUDAGraph()
        stream = ranks.streams[rank]
        with torch.cuda.device(rank), torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                ranks.launch(rank, which, nbytes)
        graphs.append(graph)
    times = []
    for _ in range(repeat + 1):
        events: list[list[Any]] = [[], []]

        def replay(rank: int, events: list[list[Any]] = events) -> None:
            for side in events:
                side.append(torch.cuda.Event(enable_timing=True))
            events[0][rank].record()
            graphs[rank].replay()
            events[1][rank].record()

        ranks.each(replay)
        ranks.finish()
        slowest = max(a.elapsed_time(b) for a, b in zip(*events, strict=True))
        times.append(slowest * 1e3 / calls)
    return statistics.median(times[1:])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=min(4, torch.cuda.device_count()))
    parser.add_argument("--repeat", type=int, default=9)
    arguments = parser.parse_args()
    world = arguments.world
    ranks = Ranks(world)
    rows = []
    for which, (op, _, _, most) in WAYS.items():
        for nbytes in (size for size in SIZES if size <= most):
            taken = measure(ranks, which, nbytes, arguments.repeat)
            sent = nbytes * (world - 1) / world * (2 if op == "all_reduce" else 1)
            row = {"call": which, "nbytes": nbytes, "us": round(taken, 2)}
            rows.append({**row, "gbs": round(sent / taken / 1e3, 1)})
    missed = [
        f"{op} of {nbytes} bytes: {best:.1f} us (bar {bar})"
        for (op, nbytes), bar in BAR_US.items()
        for best in [
            min(r["us"] for r in rows if r["call"].startswith(op) and r["nbytes"] == nbytes)
        ]
        if best > bar
    ]
    results_file.write(
        "collectives",
        {
            **devices(torch.device("cuda")),
            "world": world,
            "repeat": arguments.repeat,
            "calls": rows,
        },
    )
    print(f"\nus a call, {world} ranks" + "".join(f"{size >> 10:>9}K" for size in SIZES))
    for which in WAYS:
        print(f"{which:>30}" + "".join(f"{r['us']:>10.1f}" for r in rows if r["call"] == which))
    for which in WAYS:
        print(f"{which:>30}" + "".join(f"{r['gbs']:>10.1f}" for r in rows if r["call"] == which))
    print("\n".join(f"MISSED {text}" for text in missed) or "all bars met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
