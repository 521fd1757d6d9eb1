"""Calls of the GEMM ops and of AllReduce on a rank, for :mod:`calls`, and what breaks them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import calls
import torch
from calls import LATE_S, Tensors, spin
from few_elements import few_right, new_residual_right
from in_world import DEADLINE_S
from torch.distributed import TCPStore

import mkernel
from mkernel.backends.accelerators.cuda.device_session import DeviceSession
from mkernel.backends.accelerators.hopper.schedule import FewRowsSchedule
from mkernel.cases import case_of
from mkernel.cases.all_reduce import EPS
from mkernel.cases.base import Case
from mkernel.cases.gemm import GemmCase
from mkernel.errors import WorldError
from mkernel.launch import report
from mkernel.plan.model import DtypeName, PathName, ScaleMode

OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")


@dataclass(frozen=True)
class Shape:
    """One op at one size."""

    op: str
    m: int
    n: int
    k: int = 0  # none of an all_reduce
    dtype: DtypeName = "bfloat16"
    layout: str = "row"
    path: PathName | None = None  # instead of the setting's
    out_dtype: DtypeName | None = None  # another one than dtype
    scales: ScaleMode | None = None  # of e4m3 operands
    fast: bool = False  # use_fast_accum
    bias: bool = False
    chunk: int | None = None
    norm: str | None = None  # of a sum's rows: "alone", or behind a "residual"
    to: str = "own"  # memory of an all_reduce's result: its own, "x", or "symmetric"
    gathered: bool = False  # return_gathered

    def work(self, seed: int = 0) -> Work:
        """Make its tensors on this rank."""
        return Work(self, self.case(seed))

    def case(self, seed: int = 0) -> Case:
        """Return the op's case."""
        sizes = {"m": self.m, "n": self.n} | ({"k": self.k} if self.k else {})
        options = {
            "replicate_b": False, "scales": self.scales, "bias": self.bias,
            "use_fast_accum": self.fast, "path": self.path,
        } if self.k else {}  # fmt: skip
        options |= {} if self.norm is None else {"norm": self.norm}
        return case_of(self.op)(
            sizes, self.dtype, self.out_dtype or self.dtype, self.layout, self.chunk, seed, options,
            calls.DEVICE,
        )  # fmt: skip


def rows(
    m: int, n: int, dtype: DtypeName = "bfloat16", norm: str | None = None, to: str = "own"
) -> Shape:
    """Return the shape of rows that are summed."""
    return Shape("all_reduce", m, n, dtype=dtype, norm=norm, to=to)


def normed(
    m: int,
    n: int,
    k: int,
    dtype: DtypeName = "bfloat16",
    layout: str = "row",
    norm: str = "residual",
    bias: bool = False,
    path: PathName = "fused",
    chunk: int | None = None,
) -> Shape:
    """Return the shape of a product whose summed rows are normalised."""
    return Shape(
        "gemm_all_reduce", m, n, k, dtype, layout, path, bias=bias, norm=norm, chunk=chunk
    )  # fmt: skip


def drawn_size(chance: random.Random, most: int, step: int) -> int:
    """Draw a multiple of ``step``, about ``most`` at most: a few steps as often as many."""
    bound = chance.choice((1, 4, 16, 40, most // step))
    return step * chance.randint(1, max(1, min(bound, most // step)))


def drawn(chance: random.Random, world: int) -> Shape:
    """Draw any legal shape: from one element of alignment to a few tiles, edges everywhere."""
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


def drawn_rows(chance: random.Random, world: int) -> Shape:
    """Draw any legal rows that are summed."""
    m = chance.choice((1, 2, 3, 8, 17, 64, 131, 132, 133, 256, 1000, chance.randint(1, 2000)))
    n = 8 * chance.choice((1, 3, 128, 511, 1024, chance.randint(1, 1100)))
    return rows(
        m, n, chance.choice(("bfloat16", "float16")), chance.choice((None, "alone", "residual")),
        chance.choice(("own", "x", "symmetric")),
    )  # fmt: skip


class Work(calls.Work):
    """A shape's tensors on this rank."""

    def __init__(self, shape: Shape, case: Case) -> None:
        super().__init__(shape, case)
        if shape.to == "x":
            self.outs["out"] = self.given["x"]
        elif shape.to == "symmetric":
            memory, dtype = case.results(self.world)["out"]
            self.outs["out"] = mkernel.empty(memory, dtype)

    @property
    def out(self) -> torch.Tensor:
        """Return the memory of the op's result."""
        return self.outs["out"]

    def call(self) -> Tensors:
        """Call the public op, into ``out``; what it does, where there is a path or a norm of a
        product."""
        shape = self.shape
        if shape.k and (shape.path is not None or shape.norm is not None):
            self.done = self.case.called(self.given, self.outs, {})
            norm, whole = self.done.plan.norm, shape.chunk is None
            if norm is not None and whole and self.done.plan.accelerator == "hopper":
                assert norm.step == "launch", norm
            self.found = {name: self.done.outputs[name] for name in self._names()}
        else:
            self.found = self._results(self.public(out=self.out))
        return self.found

    def public(self, **options: Any) -> Any:
        """Call the public op; return what it returns."""
        shape, given = self.shape, dict(self.given)
        if not shape.k:
            return mkernel.all_reduce(given.pop("x"), eps=EPS, **given, **options)
        options |= given | ({"chunk": shape.chunk} if shape.chunk else {})
        options |= {"use_fast_accum": True} if shape.fast else {}
        options |= {"return_gathered": True} if shape.gathered else {}
        options |= {"eps": self.case.eps} if shape.norm else {}
        if shape.out_dtype and options.get("out") is None and "quantise" not in options:
            options["out_dtype"] = self.out.dtype
        return getattr(mkernel, shape.op)(options.pop("a"), options.pop("b"), **options)

    def _names(self) -> tuple[str, ...]:
        if self.shape.gathered:
            return ("out", "gathered")
        return ("out", "residual_out") if self.shape.norm == "residual" else ("out",)

    def wrong(self, turn: int, found: Tensors) -> list[str]:
        results = {name: each for name, each in found.items() if name != "gathered"}
        failures = super().wrong(turn, results)
        if self.shape.gathered:
            everyone = [self.case.inputs(rank, self.world, turn)["a"] for rank in range(self.world)]
            if not torch.equal(found["gathered"].float(), torch.cat(everyone).float()):
                failures.append("other rows were gathered")
        return failures

    def _results(self, found: Any) -> Tensors:
        found = found if isinstance(found, tuple) else (found,)
        return dict(zip(self._names(), found, strict=True))

    def error(self, turn: int, result: torch.Tensor) -> float:
        """Return the relative error of the whole output; infinite where it is not finite."""
        return self.case.compared({"out": result}, self.rank, self.world, turn)["out"].error

    def rounded(self, name: str, got: torch.Tensor, turn: int) -> bool:
        """Return :func:`few_right` of a product, or :func:`new_residual_right`."""
        if not isinstance(self.case, GemmCase) or (self.shape.norm and name == "out"):
            return False
        right = new_residual_right if name == "residual_out" else few_right
        return right(self.case, got, self.rank, self.world, turn)


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


def tilings(shapes: Sequence[Shape]) -> list[str | None]:
    """Return the tiles of each shape's call by mail."""
    found = []
    for shape in shapes:
        work = shape.work()
        work.fill(0)
        plan = work.case.called(work.given, work.outs, {}).plan
        found.append(plan.part(FewRowsSchedule).tiling)
    mkernel.synchronize()
    return found


def known(shapes: Sequence[Shape], rounds: int) -> list[str]:
    """Failures of calls that native code starts: into outputs of their own, of the caller, in symmetric
    memory, and on another stream, by turns; and what is wrong where it did not start them."""
    world = mkernel.world()
    works = [shape.work() for shape in shapes]
    symmetric = [mkernel.empty(tuple(work.out.shape), dtype=work.out.dtype) for work in works]
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    kept = []
    launch = DeviceSession.launch
    with mock.patch.object(DeviceSession, "launch", autospec=True, side_effect=launch) as by_python:
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
                else:
                    out = (None, work.out, everywhere)[way]
                    result = work.public(out=out)
                results = work._results(result)
                for each in results.values():
                    each.record_stream(main)
                kept.append((work, turn, {name: each.clone() for name, each in results.items()}))
    mkernel.synchronize()
    failures = [text for work, turn, found in kept for text in work.failure(turn, found, "known")]
    first = 3 * len(works)  # a signature each without out, with it, and with it in symmetric memory
    if by_python.call_count != first:
        failures.append(f"Python made {by_python.call_count} calls, of {first} that are new")
    return failures


def of_zeros(shapes: Sequence[Shape]) -> list[str]:
    """Return failures of sums with parts that are zeros, of either sign: rows of all, or one rank's."""
    failures, world = [], mkernel.world()
    for turn, shape in enumerate(list(shapes) * 4):
        case, kind = shape.case(turn), turn // len(shapes)
        given = [case.inputs(rank, world.size, 0) for rank in range(world.size)]
        for rank, a in enumerate(each["a"] for each in given):
            if kind < 3:
                a[:: kind + 1] = -0.0 if (turn + rank) % 2 else 0.0
            elif rank == turn % world.size:
                a.zero_()
        whole = {
            "a": torch.cat([each["a"] for each in given], 1),
            "b": torch.cat([each["b"] for each in given]),
        }
        work = Work(shape, case.with_(options={**case.options, "tensors": whole}))
        work.call()
        failures += work.failure(0, what=f"zeros of kind {kind}")
    mkernel.synchronize()
    return failures


def absent(shape: Shape, victim: int, deadline_s: float) -> None:
    """Reports (error type, seconds, message, sum of eight ones on the device) of a call to which the
    victim does not come. ``deadline_s``: of the others' waits for it."""
    work = shape.work()
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
    work = shape.work()
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
    failures = calls.judged([shape], 5)
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
