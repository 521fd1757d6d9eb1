"""The turns of one rank: contenders alternate, iteration by iteration, each on data of its own.

A turn draws inputs and poisons outputs (:mod:`mkernel.harness.work`), is timed by the protocol, and
then checked: every timed turn, on rows from all over the output. At the end each rank in its turn comes
late once; these turns are checked and not timed. A contender that was wrong once is wrong.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore

from mkernel.cases import compare
from mkernel.errors import ArgumentError, MkernelError, Unsupported
from mkernel.harness import provenance
from mkernel.harness.clock import Meeting
from mkernel.harness.contenders import OURS, named
from mkernel.harness.guard import Guard, Progress
from mkernel.harness.problem import Kind, Problem
from mkernel.harness.protocol import Stopwatch, stopwatch
from mkernel.harness.spec import BenchSpec, Mode, Shape
from mkernel.harness.work import PARTS, Unseen, Wanted, Work, clock, work
from mkernel.launch import report
from mkernel.world.lifecycle import current
from mkernel.world.world import World


@dataclass
class Turns:
    """What one rank found of one contender in one row.

    Attributes:
        seconds: a call, of each timed turn. starts_ns: when these turns really began on this rank, by
            CLOCK_MONOTONIC; empty where that is not known. errors: of each timed or skewed turn's
            output; infinite: not finite.
        limit: the largest error that counts as right.
        absent: why it took no part. failed: what a peer raised; it left the row then.
    """

    seconds: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    limit: float = 0.0
    absent: str | None = None
    failed: str | None = None
    starts_ns: list[int] = field(default_factory=list)


@dataclass
class RankResult:
    """What a rank sends back: by mode, rows in the spec's order, by contender; how modes are timed."""

    rows: dict[Mode, list[dict[str, Turns]]]
    platform: dict[str, Any]
    timing: dict[Mode, dict[str, Any]]


class ContenderFailed(MkernelError, RuntimeError):
    """A contender raised; the message says which, where, and what it said. A peer that raises leaves
    its row (every rank's must); mkernel itself ends the run."""


def run(spec: BenchSpec, port: int) -> RankResult:
    """Measure and check one rank's part of every row. Collective.

    ``port``: of a store on this host, for agreements on when turns start.
    """
    world = current()
    device = _device(world)
    guard = Guard()
    made = not distributed.is_initialized()
    with guard.step("the process group", spec.timeout_s):
        store = _store(port, spec.timeout_s)
        if made:
            _join(world, device, spec.timeout_s)
        starts = PrefixStore("starts", store)
        meeting = Meeting(starts, world.rank, world.size, world.seal("starts"))
    try:
        rows: dict[Mode, list[dict[str, Turns]]] = {}
        timing: dict[Mode, dict[str, Any]] = {}
        unseen, turn = Unseen(spec.shapes), 0
        for mode in spec.modes:
            watch = stopwatch(device, clock(mode, spec.launches), meeting, spec.timeout_s)
            rows[mode] = []
            for shape in spec.shapes:
                row = _Row(spec, mode, shape, device, watch, guard, unseen, turn)
                rows[mode].append(row.measure())
                turn = row.turn
                if world.rank == 0:
                    report(Progress(f"{mode} {shape.op} {shape.size}"))
            timing[mode] = watch.settings()
        return RankResult(rows, provenance.devices(device), timing)
    finally:
        guard.close()
        if made:
            distributed.destroy_process_group()


def _device(world: World) -> torch.device:
    """The rank's device: the one that its backend chose, or, where a backend uses whatever tensors
    lie on, one for each local rank."""
    if world.accelerator.device == "cpu":
        return torch.device("cpu")
    if world.accelerator.capabilities().process_group:
        count, index = torch.cuda.device_count(), world.identity.local_rank
        if index >= count:
            raise ArgumentError("--ranks", index + 1, f"at most {count}, the number of GPUs")
        torch.cuda.set_device(index)
    return torch.device(world.accelerator.device, torch.cuda.current_device())


def _store(port: int, timeout_s: float) -> TCPStore:
    # The guard's word comes first: it knows whose turn it was.
    return TCPStore(
        "127.0.0.1", port, timeout=timedelta(seconds=3 * timeout_s), wait_for_workers=False
    )


def _join(world: World, device: torch.device, timeout_s: float) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Else a thread of NCCL's group polls the store, which is Python code, until the process ends.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=world.group_store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=3 * timeout_s),
        device_id=device if device.type == "cuda" else None,
    )


class _Row:
    """One shape in one mode: its contenders and their turns."""

    def __init__(
        self,
        spec: BenchSpec,
        mode: Mode,
        shape: Shape,
        device: torch.device,
        watch: Stopwatch,
        guard: Guard,
        unseen: Unseen,
        turn: int,
    ) -> None:
        world = current()
        self.spec, self.mode, self.shape = spec, mode, shape
        self.watch, self.guard, self.unseen, self.turn = watch, guard, unseen, turn
        self.problem = Problem(
            op=shape.op,
            m=shape.m,
            n=shape.n,
            k=shape.k,
            dtype=spec.dtype,
            layout=shape.layout or spec.layout,
            seed=spec.seed,
            rank=world.rank,
            world=world.size,
            device=device,
        )
        self.found = {name: Turns() for name in spec.contenders}
        self.entered: dict[str, Work] = {}

    def measure(self) -> dict[str, Turns]:
        """All turns of all contenders."""
        for name in self.spec.contenders:
            self._enter(name)
        for iteration in range(-self.spec.warmup, self.spec.iterations + self.problem.world):
            order = list(self.entered)
            if iteration % 2:
                order.reverse()
            for name in order:
                self._take_turn(name, iteration)
        for name, entered in self.entered.items():
            with self._guarded(name, "closing"):
                entered.close()
        return self.found

    def _enter(self, name: str) -> None:
        kind = named(name)
        if kind.kind in PARTS and self.mode != "kernel":
            self.found[name].absent = "a part alone: timed in mode kernel"
            return
        self.found[name].absent = kind.unusable(self.problem)
        if self.found[name].absent is not None:
            return
        try:
            with self._guarded(name, "setting up"):
                made = work(self.mode, kind, self.problem, self.unseen)
        except ContenderFailed as error:
            self._drop(name, error)
        else:
            self.entered[name] = made

    def _drop(self, name: str, error: ContenderFailed) -> None:
        if name in OURS:
            raise error
        self.found[name].failed = str(error)
        self.entered.pop(name, None)

    def _take_turn(self, name: str, iteration: int) -> None:
        entered, found = self.entered[name], self.found[name]
        late = iteration - self.spec.iterations  # the rank that is
        what = f"iteration {iteration}" if late < 0 else f"with rank {late} late"
        try:
            with self._guarded(name, what):
                wanted = entered.prepare(self.turn + 1)
                self.turn += len(wanted)
                found.limit = entered.limit()
                timed = self.watch.time(name, entered.run, late=late == self.problem.rank)
        except (Unsupported, ArgumentError) as error:  # refused before anything was started
            found.absent = f"refused: {error}"
            del self.entered[name]
            return
        except ContenderFailed as error:
            self._drop(name, error)
            return
        if iteration < 0:
            return
        if late < 0:
            found.seconds.append(timed.seconds / entered.calls)
            if timed.started_ns is not None:
                found.starts_ns.append(timed.started_ns)
        kind = named(name).kind
        with self._guarded(name, f"check of {what}"):
            found.errors += [
                _error(kind, each, result)
                for each, result in zip(wanted[-len(timed.results) :], timed.results, strict=True)
            ]

    def _guarded(self, name: str, what: str) -> _Named:
        text = f"{name} at {self.shape.op} {self.shape.size}, {what}"
        return _Named(self.guard, text, self.spec.timeout_s)


class _Named:
    """A guarded step whose errors say whose they are."""

    def __init__(self, guard: Guard, text: str, timeout_s: float) -> None:
        self._text = text
        self._step = guard.step(text, timeout_s)

    def __enter__(self) -> None:
        self._step.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._step.__exit__(None, None, None)
        if error is not None and not isinstance(error, MkernelError):
            raise ContenderFailed(f"{self._text}: {type(error).__name__}: {error}") from error


def _error(kind: Kind, wanted: Wanted, result: torch.Tensor) -> float:
    problem, turn = wanted.problem, wanted.turn
    if tuple(result.shape) != problem.out_shape(kind):
        return float("inf")
    if not bool(torch.isfinite(result).all()):
        return float("inf")
    rows = problem.sampled_rows(kind, turn)
    return compare(result[rows], problem.reference(kind, turn, rows)).error
