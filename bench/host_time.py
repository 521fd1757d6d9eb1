"""What a call costs its host: microseconds a call of calls that only queue, and of first calls.

    python bench/host_time.py [--ranks 2] [--accelerator hopper] [--write]
    python bench/host_time.py --ranks 1 --accelerator nothing       on a CPU: all but the launch

A spinning kernel holds the stream while the calls are queued, so that nothing waits for the device; the
figure is the time of the loop by the number of calls, the median over repeats, of the slower rank. The
hold must outlast the loop, else there is no figure. By path, each in a world of its own:
  known         a signature that was called before, without gradients
  known, out    the same into an output of the caller
  known, grad   the same while b requires grad: through torch's dispatcher, which records a graph
  several       known, after `--shapes` calls of other shapes
  first         the first call of a new shape, one at a time
  mm            torch.mm of the same sizes
and how many objects and blocks of memory 10,000 known calls leave behind.
Bars: fused 12 us a known call, library 8 us more than mm, the same after the other shapes; first 300.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import results_file
import torch

import mkernel

M, N, K = 512, 1024, 1024
OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
HOLD_CYCLES = 150_000_000  # some 80 ms on an H200
BARS = {"fused": 12.0, "library over mm": 8.0, "first": 300.0}
NOTHING = "nothing_backend:Nothing"


class Stream:
    """The current stream, which can be held; of a CPU there is none."""

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = torch.cuda if device.type == "cuda" else None

    def hold(self) -> Any:
        """What is queued from now on waits; returns what tells whether it still does."""
        if self._cuda is None:
            return None
        self.wait()
        self._cuda._sleep(HOLD_CYCLES)
        event = self._cuda.Event()
        event.record()
        return event

    def wait(self) -> None:
        """For all that is queued."""
        if self._cuda is not None:
            self._cuda.synchronize()


class Timer:
    """Times loops of calls behind a held stream."""

    def __init__(self, device: torch.device, calls: int, repeats: int) -> None:
        self.stream = Stream(device)
        self._calls = calls
        self._repeats = repeats

    def us(self, call: Callable[[], object]) -> float:
        """Of a call, on this rank; nan where the device was let go too early."""
        for _ in range(3):
            call()
        return statistics.median(self._one_loop(call) for _ in range(self._repeats))

    def _one_loop(self, call: Callable[[], object]) -> float:
        mkernel.world().barrier()
        held = self.stream.hold()
        start = time.perf_counter_ns()
        for _ in range(self._calls):
            call()
        passed = time.perf_counter_ns() - start
        early = held is not None and held.query()
        self.stream.wait()
        mkernel.synchronize()
        return float("nan") if early else passed / 1000 / self._calls


def operands(op: str, device: torch.device, rows: int = M) -> tuple[torch.Tensor, torch.Tensor]:
    """``a`` and ``b`` of a rank, of ``rows`` rows of the result in all."""
    ranks = mkernel.world().size
    own = rows // ranks if op == "all_gather_gemm" else rows
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    return (
        torch.ones(own, K, dtype=half, device=device),
        torch.ones(K, N, dtype=half, device=device),
    )


def of_one_rank(calls: int, repeats: int, shapes: int, cuda: bool) -> dict[str, float]:
    """All figures of this rank, in us; counts of what stays behind."""
    torch.set_grad_enabled(False)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    timer, found = Timer(device, calls, repeats), dict[str, float]()
    for op in OPS:
        run = getattr(mkernel, op)
        a, b = operands(op, device)
        out = run(a, b)
        if cuda:  # a CPU's multiplies before it returns
            whole = torch.ones(M, K, dtype=a.dtype, device=device)
            found[f"{op} mm"] = timer.us(lambda whole=whole, b=b: torch.mm(whole, b))
        found[f"{op} known"] = timer.us(lambda run=run, a=a, b=b: run(a, b))
        found[f"{op} known, out"] = timer.us(lambda run=run, a=a, b=b, out=out: run(a, b, out=out))
        weight = b.clone().requires_grad_()
        with torch.enable_grad():
            found[f"{op} known, grad"] = timer.us(lambda run=run, a=a, b=weight: run(a, b))
    found |= left_behind(*operands(OPS[2], device))
    firsts = []
    run = getattr(mkernel, OPS[2])
    ranks, most = mkernel.world().size, 8 * shapes
    b = torch.ones(64, 64, dtype=a.dtype, device=device)
    rows = torch.ones(most + 8 * ranks, 64, dtype=a.dtype, device=device)
    run(rows, b)  # the memory of all of them
    for number in range(shapes):
        part = rows[: 8 * (number + 1)]
        start = time.perf_counter_ns()
        run(part, b)
        firsts.append((time.perf_counter_ns() - start) / 1000)
        if number % 100 == 0:
            mkernel.synchronize()
    timer.stream.wait()
    found["first"] = statistics.median(firsts)
    found["first, 90 %"] = statistics.quantiles(firsts, n=10)[-1]
    for op in OPS:
        run = getattr(mkernel, op)
        a, b = operands(op, device)
        found[f"{op} several"] = timer.us(lambda run=run, a=a, b=b: run(a, b))
    return found


def left_behind(a: torch.Tensor, b: torch.Tensor, calls: int = 10_000) -> dict[str, float]:
    """Objects that the collector knows, and blocks of Python's memory, more after so many calls."""

    def several(count: int) -> None:
        for number in range(count):
            mkernel.gemm_all_reduce(a, b)
            if number % 100 == 0:
                mkernel.synchronize()

    several(200)
    gc.collect()
    objects, blocks = len(gc.get_objects()), sys.getallocatedblocks()
    several(calls)
    mkernel.synchronize()
    gc.collect()
    return {
        "objects left": len(gc.get_objects()) - objects,
        "blocks left": sys.getallocatedblocks() - blocks,
    }


def main() -> int:
    """Print a table a path; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--accelerator", default="hopper")
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--shapes", type=int, default=5000)
    parser.add_argument("--write", action="store_true", help="into bench/results/host_time.json")
    given = parser.parse_args()
    nothing = given.accelerator == "nothing"
    figures: dict[str, dict[str, float]] = {}
    missed: list[str] = []
    for path in ("fused",) if nothing else ("fused", "library"):
        os.environ["MKERNEL_PATH"] = path
        ranks = mkernel.launch(
            of_one_rank, given.calls, given.repeats, given.shapes, not nothing,
            ranks_per_node=given.ranks,
            accelerator=NOTHING if nothing else given.accelerator,
        )  # fmt: skip
        figures[path] = found = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
        print(f"{path}, {given.ranks} ranks")
        for name, value in found.items():
            print(f"  {name:36} {value:10.1f}")
        for op in OPS:
            bar = BARS["fused"] if path == "fused" else found[f"{op} mm"] + BARS["library over mm"]
            missed += [
                f"{path} {op} {what}: {found[f'{op} {what}']:.1f} us, bar {bar:.1f}"
                for what in ("known", "several")
                if not found[f"{op} {what}"] <= bar
            ]
        if not found["first"] <= BARS["first"]:
            missed.append(f"{path} first: {found['first']:.0f} us, bar {BARS['first']:.0f}")
    if given.write:
        results_file.write("host_time", figures)
    print("\n".join(missed) or "all bars met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
