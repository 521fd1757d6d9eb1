"""Measures what a call costs its host: microseconds of calls that only queue, and of new row counts.

    python bench/host_time.py [--ranks 2] [--accelerator hopper] [--write]
    python bench/host_time.py --ranks 1 --accelerator nothing       on a CPU: all but the launch

A spinning kernel holds the stream while the calls are queued, so that nothing waits for the device; the
figure is the time of the loop by the number of calls, the median over repeats, of the slower rank.
Ours and torch's take turns. The hold must outlast the loop, else there is no figure. By path (fused
and library), each in a world of its own, and for every op, also along dimension 1 of B sequences:
  known         a signature that was called before, without gradients
  step          forward and backward, with gradients of both operands
  compiled      known, from a graph of Inductor
  graph         a call in a CUDA graph, of its replay
  mm, mm step, mm compiled, mm graph
                torch's product of the same sizes in the same mode
  commands      what a known call queues by the driver: launches, copies, waits, records
  known, out    into an output of the caller
  known, grad   known while b requires grad: a graph is recorded
  several       known, after `--rows` calls of other row counts
  new rows      calls of row counts that were not seen before, in random order, each waited for, above
                torch.mm of the same new sizes; `growing` are those of more rows than any before
  drawn         an eager loop over a tenth as many row counts not seen before, and of torch's collective
                and product (drawn mm)
  after a pause one call of AllGather+GEMM, GEMM+AllReduce, AllReduce, mm, and mm with torch's
                all_reduce after 0.7 s in which nothing runs, until its device is done; path fused alone
and how many objects and blocks of memory 10,000 known calls leave behind.
Bars on a GPU: known and several, mm and 2 us, and 2.5 us a command beyond the first; step, twice
torch's; compiled, mm's and 8 us; graph, mm's and 1 us; new rows 150 us, 500 us of 99 %; drawn, torch's;
after a pause, mm's and 60 us.
Two ranks on one GPU have no collective of torch beside them.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import graphs
import results_file
import torch
from torch import distributed
from torch.distributed import PrefixStore
from torch_group import default_group

import mkernel
from mkernel.harness.clock import Meeting, wait_until
from mkernel.harness.contenders import collectives
from mkernel.harness.contenders.symm_mem import ENVIRONMENT

M, N, K = 512, 1024, 1024
OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
BATCHES = (None, 1, 4)
"""Sequences, along whose positions ranks share; None: rows are shared."""
MODES = ("known", "step", "compiled", "graph")
CYCLES_A_SECOND, LONGEST_HOLD = 8e9, 150_000_000
"""A loop is held by so many cycles for each second that it took unheld: four times as long at 2 GHz.
The longest hold is some 80 ms on an H200."""
OVER_MM_US, COMMAND_US = {"known": 2.0, "compiled": 8.0, "graph": 1.0}, 2.5
STEP_BY_MM = 2.0
NEW_ROWS_US, NEW_ROWS_99_US = 150.0, 500.0
PAUSED = ("all_gather_gemm", "gemm_all_reduce", "all_reduce")
DRAWN_PART, DRAWN_BLOCK = 10, 50
"""The loop beside torch's collective has a tenth of the row counts, in blocks that take turns."""
QUEUES = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cuMemcpy", "cudaMemset", "cuMemset", "cuStreamW",
          "cuStreamBatch", "cudaEventRecord", "cuEventRecord", "cudaStreamWait")  # fmt: skip
"""The beginnings of the names of driver functions that put something on a stream."""
PAUSE_S, AWAKE_S, OVER_MM_PAUSED_US = 0.7, 1e-3, 60.0
"""A host sleeps but for the end of a pause, so that ranks start together."""
NOTHING = "nothing_backend:Nothing"


class Stream:
    """The current stream, which can be held; of a CPU there is none."""

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = torch.cuda if device.type == "cuda" else None

    def hold(self, cycles: int) -> Any:
        """What is queued from now on waits; returns what tells whether it still does."""
        if self._cuda is None:
            return None
        self.wait()
        self._cuda._sleep(cycles)
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

    def us(self, calls: Mapping[str, Callable[[], object]], shorter: int = 1) -> dict[str, float]:
        """Microseconds of each call on this rank, in turns; nan where the device was let go too
        early in half of them. ``shorter``: divides the loop, of calls that queue more."""
        number = self._calls // shorter or 1
        cycles = {}
        for name, call in calls.items():
            for _ in range(3):
                call()
            start = time.perf_counter()
            for _ in range(number):
                call()
            took_s = time.perf_counter() - start
            cycles[name] = min(LONGEST_HOLD, round((took_s + 1e-3) * CYCLES_A_SECOND))
        loops = [
            {name: self._one_loop(call, number, cycles[name]) for name, call in calls.items()}
            for _ in range(self._repeats)
        ]
        kept = {name: [loop[name] for loop in loops if loop[name] > 0] for name in calls}
        return {
            name: statistics.median(each) if 2 * len(each) > self._repeats else math.nan
            for name, each in kept.items()
        }

    def _one_loop(self, call: Callable[[], object], calls: int, cycles: int) -> float:
        mkernel.world().barrier()
        held = self.stream.hold(cycles)
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        passed = time.perf_counter_ns() - start
        early = held is not None and held.query()
        self.stream.wait()
        mkernel.synchronize()
        return math.nan if early else passed / 1000 / calls

    def waited_us(self, call: Callable[[], object]) -> float:
        """Microseconds of one call until its device is done."""
        self.stream.wait()
        start = time.perf_counter_ns()
        call()
        self.stream.wait()
        return (time.perf_counter_ns() - start) / 1000


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ALONG_POSITIONS: dict[str, Product] = {
    "all_gather_gemm": lambda a, b: mkernel.all_gather_gemm(a, b, gather_dim=1),
    "gemm_reduce_scatter": lambda a, b: mkernel.gemm_reduce_scatter(a, b, scatter_dim=1),
}


def multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch's product, as one function that can be compiled."""
    return torch.matmul(a, b)


class Op:
    """One op and torch's product of the same sizes, of rows or of ``batch`` sequences."""

    def __init__(self, name: str, batch: int | None, device: torch.device) -> None:
        ranks, gathers = mkernel.world().size, name == "all_gather_gemm"
        options: dict[str, Any] = {"device": device}
        options["dtype"] = torch.bfloat16 if device.type == "cuda" else torch.float32
        sizes = (M,) if batch is None else (batch, M // batch)
        own = (*sizes[:-1], sizes[-1] // ranks)
        self.whole = torch.ones(*sizes, K, **options)
        self.a = torch.ones(*(own if gathers else sizes), K, **options)
        self.b = torch.ones(K, N, **options)
        self.mine: Product = getattr(mkernel, name)
        if batch is not None:
            self.mine = ALONG_POSITIONS.get(name, self.mine)

    def calls(self, mode: str) -> dict[str, Callable[[], object]]:
        """Return ours and torch's call in a mode, by their names in the results."""
        torch._dynamo.reset()
        pairs: dict[str, tuple[Product, torch.Tensor]] = {
            mode: (self.mine, self.a),
            "mm" if mode == "known" else f"mm {mode}": (multiplied, self.whole),
        }
        return {name: self._in_mode(mode, *pair) for name, pair in pairs.items()}

    def _in_mode(self, mode: str, run: Product, a: torch.Tensor) -> Callable[[], object]:
        if mode == "step":
            both = a.clone().requires_grad_(), self.b.clone().requires_grad_()
            with torch.enable_grad():
                gradient = torch.ones_like(run(*both))

            def step() -> object:
                with torch.enable_grad():
                    return torch.autograd.grad(run(*both), both, gradient)

            return step
        if mode == "compiled":
            compiled = torch.compile(run, fullgraph=True, dynamic=False)
            return lambda: compiled(a, self.b)
        if mode == "graph":
            return graphs.captured([lambda: run(a, self.b)] * 2).replay
        return lambda: run(a, self.b)


def commands(call: Callable[[], object], calls: int = 10) -> float:
    """Count what a call queues by the driver; nan where nothing records that."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    queued = sum(event.count for event in recorded.key_averages() if event.key.startswith(QUEUES))
    return queued / calls or math.nan


def of_one_rank(calls: int, repeats: int, rows: int, pauses: int, cuda: bool) -> dict[str, float]:
    """All figures of this rank, in us; counts of what stays behind."""
    torch.set_grad_enabled(False)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    timer, found = Timer(device, calls, repeats), dict[str, float]()
    known = {}
    for name in OPS:
        for batch in BATCHES:
            op = Op(name, batch, device)
            where = name if batch is None else f"{name}, dim 1 of {batch},"
            for mode in MODES if cuda else MODES[:3]:
                both = op.calls(mode)
                if not cuda:  # a CPU's product is over before it returns
                    both = {mode: both[mode]}
                each = timer.us(both, shorter=3 if mode == "step" else 1)
                for what, us in each.items():  # a graph has two calls
                    found[f"{where} {what}"] = us / 2 if mode == "graph" else us
            if cuda:
                found[f"{where} commands"] = commands(lambda op=op: op.mine(op.a, op.b))
            if batch is None:
                known[name] = op
                out, weight = op.mine(op.a, op.b), op.b.clone().requires_grad_()
                run, a, b = getattr(mkernel, name), op.a, op.b
                with_out = timer.us({"": lambda run=run, a=a, b=b, out=out: run(a, b, out=out)})
                found[f"{name} known, out"] = with_out[""]
                with torch.enable_grad():
                    recording = timer.us({"": lambda run=run, a=a, b=weight: run(a, b)})
                found[f"{name} known, grad"] = recording[""]
    found |= left_behind(known[OPS[2]].a, known[OPS[2]].b)
    for name, op in known.items():
        with default_group(cuda):
            found |= {f"{name} {what}": us for what, us in new_rows(name, op, rows, timer).items()}
    with default_group(cuda):
        found |= after_pauses(known, pauses, timer)
    for name, op in known.items():
        found[f"{name} several"] = timer.us({"": lambda op=op: op.mine(op.a, op.b)})[""]
    return found


# ---- new row counts ------------------------------------------------------------------------------


def new_rows(name: str, op: Op, count: int, timer: Timer) -> dict[str, float]:
    """Call one op with ``count`` row counts that it has not seen, and a few more beside torch's
    collective. Collective."""
    ranks, gathers = mkernel.world().size, name == "all_gather_gemm"
    total = count + count // DRAWN_PART
    drawn = random.Random(name).sample(range(1, 2 * total), total)
    most = max(drawn) * ranks
    whole = torch.ones(most, K, dtype=op.a.dtype, device=op.a.device)
    part = whole[: max(drawn)].clone()
    cuda = op.a.device.type == "cuda"

    def fused(rows: int) -> object:
        return op.mine(part[:rows] if gathers else whole[: rows * ranks], op.b)

    def product(rows: int) -> object:
        return torch.mm(whole[: rows * ranks], op.b)

    above, growing, largest = [], [], 0
    for rows in drawn[:count]:
        mine = timer.waited_us(lambda rows=rows: fused(rows))
        torchs = timer.waited_us(lambda rows=rows: product(rows)) if cuda else 0.0
        (growing if rows > largest else above).append(mine - torchs)
        largest = max(largest, rows)
    found = {
        "new rows": statistics.median(above),
        "new rows, 99 %": statistics.quantiles(above, n=100)[-1],
        "new rows, growing": len(growing),
        "new rows, growing, most": max(growing),
    }
    if not distributed.is_initialized():
        return found
    totals = {"drawn": 0.0, "drawn mm": 0.0}

    def library(rows: int) -> object:
        if gathers:
            collectives.all_gather(whole[: rows * ranks], part[:rows])
        y = torch.mm(whole[: rows * ranks], op.b)
        if name == "gemm_reduce_scatter":
            return collectives.reduce_scatter(y.new_empty(rows, N), y)
        return y if gathers else distributed.all_reduce(y)

    library(1)
    loops = {"drawn": fused, "drawn mm": library}
    for number, start in enumerate(range(count, total, DRAWN_BLOCK)):
        block = drawn[start : min(start + DRAWN_BLOCK, total)]
        for what in loops if number % 2 else reversed(loops):
            mkernel.world().barrier()
            totals[what] += timer.waited_us(partial(_each, loops[what], block))
    return found | totals


def _each(call: Callable[[int], object], counts: Iterable[int]) -> None:
    for count in counts:
        call(count)


def after_pauses(ops: Mapping[str, Op], pauses: int, timer: Timer) -> dict[str, float]:
    """Time one call of each after a pause, in turns; return the medians of so many. Collective."""
    world, summed = mkernel.world(), ops["gemm_all_reduce"]
    meeting = Meeting(PrefixStore("pauses", world.group_store), world.rank, world.size)
    calls: dict[str, Callable[[], object]] = {
        name: partial(op.mine, op.a, op.b) for name, op in ops.items() if name in PAUSED
    }
    calls["all_reduce"] = partial(mkernel.all_reduce, summed.mine(summed.a, summed.b))
    calls["mm"] = partial(torch.mm, summed.a, summed.b)
    if distributed.is_initialized():
        calls["mm, all_reduce"] = lambda: distributed.all_reduce(torch.mm(summed.a, summed.b))
    us: dict[str, list[float]] = {name: [] for name in calls if pauses}
    for turn in range(pauses + 1):
        for name in us if turn % 2 == 0 else reversed(us):
            timer.stream.wait()
            start = meeting.agree(PAUSE_S if turn else 0)
            time.sleep(max(0.0, (start - time.monotonic_ns()) / 1e9 - AWAKE_S))
            wait_until(start)
            us[name].append(timer.waited_us(calls[name]))
    return {f"{name} after a pause": statistics.median(each[1:]) for name, each in us.items()}


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


def bars(found: Mapping[str, float], new: bool) -> list[str]:
    """Return the bars that a path's figures miss. What was not measured has none; what is not a number
    misses its own. ``new``: row counts have bars."""
    limits: dict[str, float] = {}

    def limit(what: str, by: str, factor: float = 1.0, over: float = 0.0) -> None:
        if by in found:
            limits[what] = factor * found[by] + over

    for name in OPS:
        for batch in BATCHES:
            where = name if batch is None else f"{name}, dim 1 of {batch},"
            queued = found.get(f"{where} commands", 1.0)
            more = 0.0 if math.isnan(queued) else COMMAND_US * max(0.0, queued - 1)
            limit(f"{where} known", f"{where} mm", over=OVER_MM_US["known"] + more)
            limit(f"{where} step", f"{where} mm step", factor=STEP_BY_MM)
            for mode in ("compiled", "graph"):
                limit(f"{where} {mode}", f"{where} mm {mode}", over=OVER_MM_US[mode])
            if batch is None:
                limit(f"{name} several", f"{name} mm", over=OVER_MM_US["known"] + more)
        limit(f"{name} drawn", f"{name} drawn mm")
        if new:
            limits |= {f"{name} new rows": NEW_ROWS_US, f"{name} new rows, 99 %": NEW_ROWS_99_US}
    for name in PAUSED:
        limit(f"{name} after a pause", "mm after a pause", over=OVER_MM_PAUSED_US)
    return [
        f"{what}: {found[what]:.1f} us, bar {bar:.1f}"
        for what, bar in limits.items()
        if what in found and not found[what] <= bar
    ]


def main() -> int:
    """Print a table a path; 1 where a bar is missed on a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--accelerator", default="hopper")
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--shapes", type=int, default=4000, help="row counts that are new")
    parser.add_argument("--pauses", type=int, default=15, help="calls of each after a pause")
    parser.add_argument("--write", action="store_true", help="into bench/results/host_time*.json")
    given = parser.parse_args()
    nothing, cuda = given.accelerator == "nothing", given.accelerator == "hopper"
    os.environ.update(ENVIRONMENT)  # multicast stays off
    figures: dict[str, dict[str, float]] = {}
    missed: list[str] = []
    # NCCL takes no two ranks of one GPU.
    alone = cuda and torch.cuda.device_count() >= given.ranks
    for path in ("fused", "library") if alone else ("fused",):
        os.environ["MKERNEL_PATH"] = path
        ranks = mkernel.launch(
            of_one_rank, given.calls, given.repeats, given.shapes,
            given.pauses if path == "fused" else 0, cuda, ranks_per_node=given.ranks,
            accelerator=NOTHING if nothing else given.accelerator,
        )  # fmt: skip
        figures[path] = found = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
        print(f"{path}, {given.ranks} ranks")
        for name, value in found.items():
            print(f"  {name:44} {value:10.1f}")
        missed += [f"{path} {each}" for each in bars(found, given.shapes > 0)] if cuda else []
    if given.write:
        results_file.write("host_time" if given.ranks == 2 else f"host_time_{given.ranks}", figures)
    print("\n".join(missed) or "all bars met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
