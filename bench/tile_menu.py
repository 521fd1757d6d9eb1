"""Times of the product alone by each tiling of hopper's GEMM kernel beside the library's, on one GPU.

    python3 bench/tile_menu.py [result.json] [count] [seed] [multiple]

Random shapes (M, N and K from 512 on, multiples of 8 or of another number), bfloat16, B column-major;
microseconds a call in a CUDA graph of several, contenders by turns, median of the replays.
``planned``: the tiling that a fused plan of one rank would take; ``path``: what any plan would.
Told are the library's time over that of the planned tiling, of all shapes and of those that plans
leave to it, and over that of the plan, where a library's product is the library's. The constants of
the fused path's tiles in ``machine.json`` are fitted to this, and tests hold tilings against it.
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
from graphs import captured, medians_us
from results_file import described

from mkernel.backends.accelerators.cuda import _kernels as native
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.memory import DeviceMemory
from mkernel.backends.accelerators.cuda.schedule import TilingName
from mkernel.backends.accelerators.hopper.gemm import tuning
from mkernel.plan import paths
from mkernel.plan.model import GemmShape

TILINGS: tuple[TilingName, ...] = ("wide", "medium", "narrow")
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
    whole = native.AllGatherSchedule(m, m)
    tensors = native.GemmTensors(a.data_ptr(), b.data_ptr(), out.data_ptr())
    processors = torch.cuda.get_device_properties(0).multi_processor_count

    def product_of(tiling: str) -> native.Product:
        return native.Product(
            n=n, k=k, half=False, n_major=False, tiling=getattr(native.Tiling, tiling),
            band=tuning.BAND, blocks=processors,
        )  # fmt: skip

    memory, control = DeviceMemory.create(native.DATA_OFFSET, 0), native.ControlBlock()
    for offset in native.epoch_offsets():
        memory.write_word(offset, 1)
    world = native.DeviceWorld([memory.address], 0, control.address, 5.0, 1)

    def kernel(product: native.Product) -> Callable[[], object]:
        product = product.of(tensors)

        def call() -> object:
            stream = torch.cuda.current_stream().cuda_stream
            native.all_gather_gemm(0, world, product, whole, False, stream)
            return memory, control  # alive as long as the call may be made

        return call

    return {
        "library": lambda: torch.mm(a, b.t(), out=out),
        **{tiling: kernel(product_of(tiling)) for tiling in TILINGS},
    }


def path(m: int, n: int, k: int, processors: int) -> str:
    """That a plan of one rank takes."""
    shape = GemmShape(m=m, n=n, k=k)
    both = paths.predict(
        "all_gather_gemm", shape, "bfloat16", 1, processors, processors, machine().constants
    )
    assert both is not None
    return "library" if both[1].pipelined_us < both[0].pipelined_us else "fused"


def measured(m: int, n: int, k: int) -> dict[str, Any]:
    """One row."""
    a, b = (torch.randn(each, k, device="cuda").bfloat16() for each in (m, n))
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    count = max(2, min(20, int(GRAPH_US / (2 * m * n * k / 6e8))))
    calls = contenders(a, b, out)  # and what they write to, until the last replay
    graphs = {name: captured([call] * count) for name, call in calls.items()}
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "m": m, "n": n, "k": k, "path": path(m, n, k, processors),
        "planned": tuning.tiling(m, 1, n, k, processors),
        **{name: round(us, 2) for name, us in medians_us(graphs, count, REPLAYS).items()},
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
    fused = [ratio for ratio, row in zip(ratios, rows, strict=True) if row["path"] == "fused"]
    left = [1.0] * (len(ratios) - len(fused))
    for name, found in (("tilings", ratios), ("fused plans", fused), ("all plans", fused + left)):
        if found:
            below = [sum(ratio < bar for ratio in found) for bar in (0.9, 0.82)]
            print(
                f"{name}: {len(found)} shapes, {statistics.geometric_mean(found):.3f} of the library, "
                f"least {min(found):.3f}, {below[0]} below 0.90, {below[1]} below 0.82"
            )
    if len(sys.argv) > 1:
        told = described("tile_menu", {"gpu": torch.cuda.get_device_name(0), "rows": rows})
        Path(sys.argv[1]).write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
