"""What rank processes on GPUs run: calls on fresh data, judged on the device in float64."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from few_elements import few_right
from in_world import DEADLINE_S
from torch.distributed import TCPStore

import mkernel
from mkernel.cases import case_of, poison
from mkernel.cases.base import TOLERANCE
from mkernel.cases.gemm import GemmCase
from mkernel.errors import WorldError
from mkernel.harness.problem import Problem, Tensors
from mkernel.launch import report
from mkernel.plan import planner
from mkernel.plan.model import DtypeName, PathName, ScaleMode

OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
LATE_S = 0.02


@dataclass(frozen=True)
class Shape:
    """One op at one size."""

    op: str
    m: int
    n: int
    k: int
    dtype: DtypeName = "bfloat16"
    layout: str = "row"
    path: PathName | None = None  # instead of the setting's
    out_dtype: DtypeName | None = None  # another one than dtype
    scales: ScaleMode | None = None  # of e4m3 operands
    fast: bool = False  # use_fast_accum
    bias: bool = False
    chunk: int | None = None


def spin(seconds: float) -> None:
    """Keep the current stream busy."""
    cuda: Any = torch.cuda
    cuda._sleep(int(seconds * 1.98e9))


def drawn_size(chance: random.Random, most: int, step: int) -> int:
    """A multiple of ``step``, about ``most`` at most: a few steps as often as many."""
    bound = chance.choice((1, 4, 16, 40, most // step))
    return step * chance.randint(1, max(1, min(bound, most // step)))


def drawn(chance: random.Random, world: int) -> Shape:
    """Any legal shape: from one element of alignment to a few tiles, edges everywhere."""
    size = partial(drawn_size, chance)
    op = chance.choice(OPS)
    return Shape(
        op,
        m=size(3000, 1 if op == "gemm_all_reduce" else world),
        n=size(2000, 8),
        k=size(2600, 8),
        dtype=chance.choice(("bfloat16", "float16")),
        layout=chance.choice(("row", "column")),
    )


@contextmanager
def deciding(tuning: ModuleType, **decisions: Any) -> Iterator[None]:
    """Within it, functions of a module of Hopper's tuning decide so, of every plan: one that this
    process has made before, in another world too, would be taken again."""
    planner._planned.cache_clear()
    asked = {name: mock.Mock(return_value=each) for name, each in decisions.items()}
    try:
        with mock.patch.multiple(tuning, **asked):
            yield
    finally:
        planner._planned.cache_clear()
    never = [name for name, each in asked.items() if not each.called]
    assert not never, f"no plan asked for {', '.join(never)}"


class Work:
    """A shape's tensors on this rank, refilled in place for every turn."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        world = mkernel.world()
        device = torch.device("cuda", torch.cuda.current_device())
        self.shape = shape
        self.out_dtype: DtypeName = shape.out_dtype or shape.dtype
        case = case_of(shape.op)(
            {"m": shape.m, "n": shape.n, "k": shape.k},
            shape.dtype,
            self.out_dtype,
            shape.layout,
            seed=seed,
            options={
                "replicate_b": False,
                "scales": shape.scales,
                "bias": shape.bias,
                "use_fast_accum": shape.fast,
                "path": shape.path,
            },
            device=str(device),
            chunk=shape.chunk,
        )
        self.problem = Problem(case, world.rank, world.size, device)
        self.inputs: Tensors = {}
        self.out = self.problem.empty("op")["out"]

    def fill(self, turn: int) -> None:
        """Fresh inputs and a poisoned output, in stream order."""
        self.problem.fill("op", self.inputs, turn)
        poison.fill(self.out)

    def call(self) -> torch.Tensor:
        """The public op, into ``out``; what it does, where the path is not the setting's."""
        if self.shape.path is None:
            return self.public(out=self.out)
        done = self.problem.case.called(self.inputs, {"out": self.out}, {})
        result: torch.Tensor = done.outputs["out"]
        return result

    def public(self, **options: Any) -> torch.Tensor:
        """The public op."""
        a, b, shape = self.inputs["a"], self.inputs["b"], self.shape
        more = ("bias", "a_scale", "b_scale")
        options |= {name: self.inputs[name] for name in more if name in self.inputs}
        options |= {"chunk": shape.chunk} if shape.chunk else {}
        options |= {"use_fast_accum": True} if shape.fast else {}
        if shape.out_dtype and options.get("out") is None:
            options["out_dtype"] = self.out.dtype
        result: torch.Tensor = getattr(mkernel, self.shape.op)(a, b, **options)
        return result

    def error(self, turn: int, result: torch.Tensor | None = None) -> float:
        """The relative error of the whole output; infinite where it is not finite."""
        result = self.out if result is None else result
        return self.problem.compared("op", {"out": result}, turn, sampled=False)["out"].error

    def failure(self, turn: int, result: torch.Tensor | None = None, what: str = "") -> list[str]:
        """Empty where the output is right."""
        problem, result = self.problem, self.out if result is None else result
        case, error = problem.case, self.error(turn, result)
        assert isinstance(case, GemmCase)
        few = (case, result, problem.rank, problem.world, turn)
        if error <= case.tolerances()["out"] or few_right(*few):
            return []
        return [f"rank {problem.rank} {self.shape} turn {turn} {what}: error {error:.1e}"]


def work_of(shape: Any, seed: int = 0) -> Any:
    """Of a shape here, or of one that brings its own work."""
    return Work(shape, seed) if isinstance(shape, Shape) else shape.work(seed)


def judged(shapes: Sequence[Shape], seed: int) -> list[str]:
    """Failures of one call each."""
    failures = []
    for turn, shape in enumerate(shapes):
        work = work_of(shape, seed)
        work.fill(turn)
        work.call()
        failures += work.failure(turn)
    mkernel.synchronize()
    return failures


def of_many_tiles() -> list[str]:
    """Failures of all-reduces whose tiles just have flags, and have none any more. Every element is a
    small multiple of a power of two, and so exact in bfloat16."""
    m, k, failures = 131_072, 64, []
    rows = torch.arange(m, device="cuda") % 7
    a = rows.bfloat16()[:, None].expand(m, k).contiguous()
    for n in (16_384, 32_768):
        columns = torch.arange(n, device="cuda") % 5 * k * mkernel.world().size
        b = (torch.arange(n, device="cuda") % 5).bfloat16().expand(k, n).contiguous()
        out = mkernel.gemm_all_reduce(a, b)
        for first in range(0, m, 8192):
            part = slice(first, first + 8192)
            if not torch.equal(out[part], (rows[part, None] * columns).bfloat16()):
                failures.append(f"{m} x {n} x {k}: rows from {first} on are wrong")
                break
        del out, b
    return failures


def skewed(shapes: Sequence[Any], rounds: int, seed: int) -> list[str]:
    """Failures of many calls that reuse all memory, ranks late by turns, shapes mixed."""
    works = [work_of(shape, seed) for shape in shapes]
    chance = random.Random(seed)  # the same on every rank
    failures = []
    for turn in range(rounds):
        work = chance.choice(works)
        late = chance.randrange(work.problem.world + 1)
        work.fill(turn)
        if late == work.problem.rank:
            spin(LATE_S)
        failures += work.failure(turn, work.call(), f"with rank {late} late")
    mkernel.synchronize()
    return failures


def queued(shapes: Sequence[Any], rounds: int, seed: int) -> list[str]:
    """The same without any wait of the host between calls: results are kept and judged at the end."""
    works = [work_of(shape, seed) for shape in shapes]
    kept = []
    for turn in range(rounds):
        work = works[turn % len(works)]
        work.fill(turn)
        if turn % work.problem.world == work.problem.rank:
            spin(LATE_S / 10)
        kept.append((work, turn, work.call().clone()))
    mkernel.synchronize()
    return [text for work, turn, result in kept for text in work.failure(turn, result, "queued")]


def known(shapes: Sequence[Shape], rounds: int) -> list[str]:
    """Failures of calls that native code starts: into outputs of their own, of the caller, in symmetric
    memory, and on another stream, by turns; and what is wrong where it did not start them."""
    world = mkernel.world()
    works = [Work(shape) for shape in shapes]
    symmetric = [mkernel.empty(tuple(work.out.shape), dtype=work.out.dtype) for work in works]
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    start, started, kept = world.known, 0, []
    assert start is not None

    def counted(*arguments: Any) -> Any:
        nonlocal started
        found = start(*arguments)
        started += isinstance(found, torch.Tensor)
        return found

    world.known = counted
    for turn in range(rounds):
        for work, everywhere in zip(works, symmetric, strict=True):
            work.fill(turn)
            if turn % (world.size + 1) == world.rank:
                spin(LATE_S / 10)
            way = turn % 4
            if way == 3:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    result = work.public()
                main.wait_stream(side)
                result.record_stream(main)
            else:
                out = (None, work.out, everywhere)[way]
                result = work.public(out=out)
            kept.append((work, turn, result.clone()))
    mkernel.synchronize()
    failures = [text for work, turn, result in kept for text in work.failure(turn, result, "known")]
    first = 3 * len(works)  # a signature each without out, with it, and with it in symmetric memory
    if started != rounds * len(works) - first:
        failures.append(f"{started} calls were started by native code, of {len(kept) - first}")
    return failures


def repeated(shape: Shape, times: int) -> list[str]:
    """Checksums of a call's bits, repeated on the same inputs under changing skew; any rank's."""
    work = Work(shape)
    sums = []
    for turn in range(times):
        work.fill(0)
        if turn % work.problem.world == work.problem.rank:
            spin(LATE_S * (turn % 3) / 3)
        work.call()
        bits = work.out.view(torch.int16).to(torch.int64)
        weights = torch.arange(1, bits.numel() + 1, device=bits.device).view_as(bits)
        sums.append(str(int((bits * weights).sum())))  # wraps, the same way every time
    assert not work.failure(0)
    return sums


def other_bits(call: Callable[[], Tensors], times: int, first: Tensors | None = None) -> list[str]:
    """What differs between calls on the same inputs, ranks late by turns. ``first``: what a call has
    returned already."""
    world = mkernel.world()
    first = call() if first is None else first
    found = []
    for turn in range(times):
        if turn % world.size == world.rank:
            spin(LATE_S / 10)
        again = call()
        found += [
            f"rank {world.rank} {name} of call {turn} has other bits"
            for name in first
            if not torch.equal(first[name], again[name])
        ]
    mkernel.synchronize()
    return found


def captured(calls: Sequence[Callable[[], Any]]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """A graph of these calls, and what they return in it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()  # plans, workspaces and libraries are made outside of the capture
    mkernel.synchronize()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    return graph, results


def replayed(shapes: Sequence[Any], replays: int, mixed: bool) -> list[str]:
    """Failures of a captured graph of all shapes' calls, with new inputs before every replay."""
    works = [work_of(shape) for shape in shapes]
    for work in works:
        work.fill(0)
    graph, results = captured([work.call for work in works])
    failures = []
    for turn in range(1, replays + 1):
        for work in works:
            work.fill(turn)
        if turn % (works[0].problem.world + 1) == works[0].problem.rank:
            spin(LATE_S / 4)
        graph.replay()
        for work, result in zip(works, results, strict=True):
            failures += work.failure(turn, result, "replayed")
        if mixed and turn % 10 == 0:
            other = -turn % (1 << 31)
            works[0].fill(other)
            failures += works[0].failure(other, works[0].call(), "between replays")
    mkernel.synchronize()
    return failures


def parts(shape: Shape, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(a, b) of an all-reduce's every rank, the same wherever they are made."""
    world, made = mkernel.world(), []
    dtype = getattr(torch, shape.dtype)
    for rank in range(world.size):
        chance = torch.Generator("cuda").manual_seed(1000 * seed + rank)
        a = torch.randn(shape.m, shape.k, generator=chance, device="cuda").to(dtype)
        b = torch.randn(shape.k, shape.n, generator=chance, device="cuda").to(dtype)
        made.append((a, b.t().contiguous().t() if shape.layout == "column" else b))
    return made


def of_zeros(shapes: Sequence[Shape]) -> list[str]:
    """Failures of sums with parts that are zeros, of either sign: rows of all, or one rank's."""
    failures = []
    for turn, shape in enumerate(list(shapes) * 4):
        made, rank = parts(shape, turn), mkernel.world().rank
        kind = turn // len(shapes)
        for other, (a, _) in enumerate(made):
            if kind < 3:
                a[:: kind + 1] = -0.0 if (turn + other) % 2 else 0.0
            elif other == turn % len(made):
                a.zero_()
        expected = sum(a.double() @ b.double() for a, b in made)
        assert isinstance(expected, torch.Tensor)
        result = mkernel.gemm_all_reduce(*made[rank]).double()
        error = float((result - expected).norm())
        if not error <= TOLERANCE[shape.dtype] * float(expected.norm()):
            failures.append(f"rank {rank} {shape} zeros of kind {kind}: off by {error:.1e}")
    mkernel.synchronize()
    return failures


def with_bias(shapes: Sequence[Shape]) -> list[str]:
    """Failures of sums with a bias, the same on all ranks."""
    failures = []
    for turn, shape in enumerate(shapes):
        made, rank = parts(shape, turn), mkernel.world().rank
        a, b = made[rank]
        row = torch.linspace(-300, 500, shape.n, device=a.device).to(a.dtype)
        result = mkernel.gemm_all_reduce(a, b, bias=row).double()
        expected = sum(x.double() @ y.double() for x, y in made) + row.double()
        error = float((result - expected).norm() / expected.norm())
        if not error <= TOLERANCE[shape.dtype]:
            failures.append(f"rank {rank} {shape}: error {error:.1e}")
    mkernel.synchronize()
    return failures


def two_streams(shapes: Sequence[Shape], rounds: int) -> list[str]:
    """Failures of calls that are queued on two streams at once, in the same order on all ranks."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    works = [[Work(shape, seed) for shape in shapes] for seed in range(2)]
    kept = []
    for turn in range(rounds):
        for number, stream in enumerate(streams):
            work = works[number][turn % len(shapes)]
            with torch.cuda.stream(stream):
                work.fill(turn)
                if (turn + number) % work.problem.world == work.problem.rank:
                    spin(LATE_S / 10 * (1 + number))
                kept.append((work, turn, work.call().clone(), number))
    mkernel.synchronize()
    torch.cuda.synchronize()
    return [
        text
        for work, turn, result, number in kept
        for text in work.failure(turn, result, f"stream {number}")
    ]


def absent(shape: Shape, victim: int, deadline_s: float) -> None:
    """Reports (error type, seconds, message, sum of eight ones on the device) of a call to which the
    victim does not come. ``deadline_s``: of the others' waits for it."""
    work = work_of(shape)
    work.fill(0)
    work.call()
    mkernel.synchronize()
    world = mkernel.world()
    world.barrier()
    if world.rank == victim:
        world.barrier()  # nobody else comes to it: it ends when the world breaks
    world.set_timeout(deadline_s)
    start = time.monotonic()
    try:
        work.fill(1)
        work.call()
        mkernel.synchronize()
    except WorldError as error:
        alive = float(torch.ones(8, device="cuda").sum())
        report((type(error).__name__, time.monotonic() - start, str(error), alive))
        raise


def survive(
    rank: int,
    size: int,
    victim: int,
    ports: tuple[int, int],
    shape: Shape,
    told: Any,
    accelerator: str,
    environment: dict[str, str],
    nodes: int = 1,
) -> None:
    """A process of a world whose victim is killed while the others' devices wait for it; then a
    smaller world in the surviving processes. Tells (rank, what happened). ``environment``: the test's
    of now; the fork server's is older."""
    os.environ.update(environment)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    _join(rank, size, ports[0], accelerator, nodes)
    work = work_of(shape)
    work.fill(0)
    work.call()
    mkernel.synchronize()
    mkernel.world().barrier()
    work.fill(1)
    if rank == victim:
        torch.cuda.synchronize()
        time.sleep(0.5)  # the others' kernels are under way by then
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        work.call()
        mkernel.synchronize()
        kind = "no error"
    except WorldError as error:
        kind = f"{type(error).__name__}: {error}"
        mkernel.finalize(error)
    seconds = time.monotonic() - start
    alive = float(torch.ones(8, device="cuda").sum())
    _join(rank - (rank > victim), size - 1, ports[1], accelerator, nodes - 1 or 1)
    failures = judged([shape], 5)
    mkernel.finalize()
    told.put((rank, kind, seconds, alive, failures))


def _join(rank: int, size: int, port: int, accelerator: str, nodes: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size)
    )
    stores = [TCPStore("127.0.0.1", port, wait_for_workers=False) for _ in range(2)]
    mkernel.init(
        accelerator=accelerator, nodes=nodes, timeout_s=DEADLINE_S, stores=(stores[0], stores[1])
    )
