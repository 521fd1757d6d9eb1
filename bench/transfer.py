"""The copy engines between two GPUs, within one, and to and from the host: time by size.

    python bench/transfer.py [--repeat 9] [--max-mib 1024] [--engines FILE]

The copies run on GPU 0; a put goes to GPU 1, a get comes from there. Two times a copy: *device*, of
many copies in one CUDA graph, and *launched*, of many launched one after another, where the host's
cost of a launch may be the longer one. Both are medians over repeats. Source and destination stay
the same, so that copies of less than the L2 cache find their source there, as after a producer's
kernel. Beside the engines: torch's copy_, launched.
--engines writes the device times into the data file that the choice of an engine reads
(backends/accelerators/cuda/machine.json).
Bars, as ratios to the copy engine's rate at 256 MiB, at most 16 blocks: bulk put 0.89, bulk get 0.94;
and at 1 MiB and below the bulk engine is faster than the copy engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results_file
import torch
from machine_file import write_section

from mkernel.backends.accelerators.cuda import _cuda, _kernels
from mkernel.backends.accelerators.cuda.memory import bytes_at
from mkernel.harness.provenance import devices

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB << (2 * i) for i in range(10)]  # 4 KiB to 1 GiB
BLOCKS = (8, 16)
CONTENDERS = [
    ("copy_engine", 0), ("torch", 0), *((one, blocks) for one in ("bulk", "plain") for blocks in BLOCKS)
]  # fmt: skip
"""Engines, and the blocks of those that run on multiprocessors."""
DIRECTIONS = ("put", "get", "local", "to_host", "from_host")
RATE_BARS = {"put": 0.89, "get": 0.94}
BATCH_BYTES = 256 * MIB
MOST_COPIES = 40


class Memory:
    """``nbytes`` of each kind, random, as addresses and tensors."""

    def __init__(self, nbytes: int) -> None:
        self.local = [torch.empty(nbytes, dtype=torch.uint8, device="cuda:0") for _ in range(2)]
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.peer: torch.Tensor | None = None
        self.peer_address = 0
        if torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1):
            self._owned = _cuda.DeviceMemory.create(1, nbytes)
            fd = self._owned.export_fd()
            try:
                self._mapped = _cuda.DeviceMemory.attach(0, fd, self._owned.mapped_bytes)
            finally:
                os.close(fd)
            self.peer_address = self._mapped.address
            self.peer = bytes_at(self._owned.address, nbytes, self._owned)
            # torch copies between devices only what its own allocator gave it
            self.torch_peer = torch.empty(nbytes, dtype=torch.uint8, device="cuda:1")

    def torch_pair(self, direction: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Destination and source of torch's own copy; only where ``pair`` gives one."""
        if direction == "put":
            return self.torch_peer, self.local[0]
        if direction == "get":
            return self.local[0], self.torch_peer
        pair = self.pair(direction)
        assert pair is not None
        return pair[:2]

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor of any kind holds, on GPU 0."""
        if tensor.data_ptr() != (0 if self.peer is None else self.peer.data_ptr()):
            return tensor.to("cuda:0")
        seen = torch.empty(tensor.numel(), dtype=torch.uint8, device="cuda:0")
        stream = torch.cuda.current_stream().cuda_stream
        plain = _kernels.Engine.plain
        _kernels.copy(seen.data_ptr(), self.peer_address, seen.nbytes, plain, stream=stream)
        return seen

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """``values``, on GPU 0, into a tensor of any kind."""
        if tensor.data_ptr() != (0 if self.peer is None else self.peer.data_ptr()):
            tensor.copy_(values)
            return
        stream = torch.cuda.current_stream().cuda_stream
        plain = _kernels.Engine.plain
        _kernels.copy(self.peer_address, values.data_ptr(), values.nbytes, plain, stream=stream)

    def pair(self, direction: str) -> tuple[torch.Tensor, torch.Tensor, int, int] | None:
        """Destination and source as tensors, then as addresses for GPU 0; None without a peer."""
        local, other = self.local
        if direction == "local":
            return other, local, other.data_ptr(), local.data_ptr()
        if direction == "to_host":
            return self.host, local, self.host.data_ptr(), local.data_ptr()
        if direction == "from_host":
            return local, self.host, local.data_ptr(), self.host.data_ptr()
        if self.peer is None:
            return None
        if direction == "put":
            return self.peer, local, self.peer_address, local.data_ptr()
        return local, self.peer, local.data_ptr(), self.peer_address


def median_us(run: Callable[[], object], copies: int, repeat: int) -> float:
    """Of one of the ``copies`` that ``run`` puts on the current stream."""
    times = []
    for _ in range(repeat + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / copies)
    return statistics.median(times[1:])


def measure(
    memory: Memory, direction: str, engine: str, blocks: int, nbytes: int, repeat: int
) -> dict[str, Any] | None:
    """One row of the figures; checks what the last copy left."""
    pair = memory.pair(direction)
    if pair is None:
        return None
    dst, src, to, from_ = pair
    if engine == "torch":
        dst, src = memory.torch_pair(direction)
    copies = max(1, min(MOST_COPIES, BATCH_BYTES // nbytes))
    source = src[:nbytes]
    memory.write(source, torch.randint(0, 256, (nbytes,), device="cuda:0", dtype=torch.uint8))
    dst[:nbytes].fill_(0)
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)

    def batch() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(copies):
            if engine == "torch":
                dst[:nbytes].copy_(source, non_blocking=True)
            else:
                kind = getattr(_kernels.Engine, engine)
                _kernels.copy(to, from_, nbytes, kind, max(blocks, 1), stream=stream)

    launched = median_us(batch, copies, repeat)
    device_us = None
    if engine != "torch":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            batch()
        device_us = median_us(graph.replay, copies, repeat)
    torch.cuda.synchronize()
    if not torch.equal(memory.read(dst[:nbytes]), memory.read(source)):
        raise RuntimeError(f"{engine} {direction} of {nbytes} bytes on {blocks} blocks is wrong")
    best = min(device_us or launched, launched)
    return {
        "direction": direction,
        "engine": engine,
        "blocks": blocks,
        "nbytes": nbytes,
        "device_us": device_us and round(device_us, 3),
        "launched_us": round(launched, 3),
        "gbs": round(nbytes / best / 1e3, 2),
    }


def rate(rows: list[dict[str, Any]], direction: str, engine: str, nbytes: int) -> float:
    """Return the best of the rows, GB/s; 0 where there is none."""
    wanted = {"direction": direction, "engine": engine, "nbytes": nbytes}
    return max((row["gbs"] for row in rows if row.items() >= wanted.items()), default=0.0)


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the module's text promises, and what was found."""
    found = []
    for direction, bar in RATE_BARS.items():
        small = [(nbytes, 1.0) for nbytes in SIZES if nbytes <= MIB]
        for nbytes, least in ((256 * MIB, bar), *small):
            engine = rate(rows, direction, "copy_engine", nbytes)
            if engine:
                ratio = rate(rows, direction, "bulk", nbytes) / engine
                name = f"{direction} {nbytes // KIB} KiB, bulk to copy engine"
                met = ratio >= least if nbytes > MIB else ratio > least
                found.append({"what": name, "found": round(ratio, 3), "bar": least, "met": met})
    return found


def write_engines(file: Path, rows: list[dict[str, Any]]) -> None:
    """The device times into a data file, as transfer/engines.py reads them."""
    directions: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["device_us"] is None:
            continue
        curves = directions.setdefault(row["direction"], [])
        named = {"engine": row["engine"], "blocks": row["blocks"]}
        curve = next((c for c in curves if c.items() >= named.items()), None)
        if curve is None:
            curve = {**named, "points": []}
            curves.append(curve)
        curve["points"].append({"nbytes": row["nbytes"], "microseconds": row["device_us"]})
    gpus = devices(torch.device("cuda"))
    source = f"bench/transfer.py on {gpus['gpus'][0]}, driver {gpus['driver']}"
    kept = {**json.loads(file.read_text())["copies"], "source": source, "directions": directions}
    write_section(file, "copies", kept)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--max-mib", type=int, default=1024)
    parser.add_argument("--engines", type=Path, default=None)
    arguments = parser.parse_args()

    torch.cuda.set_device(0)
    sizes = [size for size in SIZES if size <= arguments.max_mib * MIB]
    memory = Memory(max(sizes))
    rows = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for direction in DIRECTIONS:
            for engine, blocks in CONTENDERS:
                for nbytes in sizes:
                    row = measure(memory, direction, engine, blocks, nbytes, arguments.repeat)
                    if row is not None:
                        rows.append(row)
    checked = bars(rows)
    results_file.write(
        "transfer",
        {
            **devices(torch.device("cuda")),
            "repeat": arguments.repeat,
            "copies": rows,
            "bars": checked,
        },
    )
    if arguments.engines is not None:
        write_engines(arguments.engines, rows)
    for bar in checked:
        print(
            f"{'met   ' if bar['met'] else 'MISSED'} {bar['what']}: {bar['found']} (bar {bar['bar']})"
        )
    return 0 if all(bar["met"] for bar in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
