"""Times of the product alone by each tiling of hopper's GEMM kernel beside the library's, on one GPU.

    python3 bench/tile_menu.py [result.json] [count] [seed] [multiple]

Random shapes (M, N and K from 512 on, multiples of 8 or of another number), bfloat16, B column-major;
microseconds a call in a CUDA graph of several, contenders by turns, median of the replays.
``planned``: the tiling that a plan of one rank would take. The constants of ``tilings`` in
``machine.json`` are chosen by this.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from graphs import captured, replay_us
from results_file import described

from mkernel.backends.accelerators.hopper import _hopper as native
from mkernel.backends.accelerators.hopper import tuning
from mkernel.backends.cuda.memory import DeviceMemory

TILINGS = ("wide", "medium", "deep", "narrow")
FIRST = [(4096, 2184, 5120), (4096, 2048, 5120), (8192, 1064, 8192), (8192, 8192, 8192)]
REPLAYS = 5
GRAPH_US = 3000.0


def drawn(count: int, seed: int, multiple: int) -> list[tuple[int, int, int]]:
    """M, N, K."""
    chance = random.Random(seed)

    def size(least: int, most: int) -> int:
        drawn = math.exp(chance.uniform(math.log(least), math.log(most)))
        return multiple * round(drawn / multiple)

    return [(size(512, 16384), size(512, 16384), size(512, 12288)) for _ in range(count)]


def contenders(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
    """Calls by name; ``b``: [N, K]."""
    (m, k), n = a.shape, b.shape[0]
    memory, control = DeviceMemory.create(1, 0), native.ControlBlock()
    world = native.DeviceWorld([memory.address], 0, control.address, 5.0, 1)
    whole = native.AllGatherSchedule(m, m)

    def kernel(tiling: str) -> Callable[[], object]:
        product = native.Product(
            n=n, k=k, half=False, n_major=False, tiling=getattr(native.Tiling, tiling),
            band=tuning.BAND,
        ).of(native.GemmTensors(a.data_ptr(), b.data_ptr(), out.data_ptr()))  # fmt: skip

        def call() -> object:
            stream = torch.cuda.current_stream().cuda_stream
            native.all_gather_gemm(0, world, product, whole, False, stream)
            return memory, control

        return call

    return {
        "library": lambda: torch.mm(a, b.t(), out=out),
        **{tiling: kernel(tiling) for tiling in TILINGS},
    }


def measured(m: int, n: int, k: int) -> dict[str, Any]:
    """One row."""
    a, b = (torch.randn(each, k, device="cuda").bfloat16() for each in (m, n))
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    count = max(2, min(20, int(GRAPH_US / (2 * m * n * k / 6e8))))
    graphs = {name: captured([call] * count) for name, call in contenders(a, b, out).items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(1 + REPLAYS):
        for name, graph in graphs.items():
            us = replay_us(graph, count)
            if turn:
                times[name].append(us)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "m": m, "n": n, "k": k, "planned": tuning.tiling(m, 1, n, k, processors),
        **{name: round(statistics.median(found), 2) for name, found in times.items()},
    }  # fmt: skip


def main() -> None:
    """One GPU."""
    count, seed, multiple = (
        int(each) for each in [*sys.argv[2:5], *("60", "11", "8")[len(sys.argv[2:5]) :]]
    )
    rows = []
    for shape in [*FIRST, *drawn(count, seed, multiple)]:
        rows.append(measured(*shape))
        print(rows[-1], flush=True)
    ratios = [row["library"] / row[row["planned"]] for row in rows]
    print(
        f"planned: {statistics.geometric_mean(ratios):.3f} of the library, least {min(ratios):.3f}"
    )
    if len(sys.argv) > 1:
        told = described("tile_menu", {"gpu": torch.cuda.get_device_name(0), "rows": rows})
        Path(sys.argv[1]).write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
