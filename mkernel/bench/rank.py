"""The turns of one rank: contenders alternate, iteration by iteration, each on data of its own.

A turn draws inputs, poisons the output (and memory that a contender may allocate it from), is
timed by the protocol, and then checked: every timed turn, on rows from all over the output. At the end
each rank in its turn comes late once; these turns are checked and not timed. A contender that was wrong
once is wrong.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import TCPStore

from mkernel.bench import provenance
from mkernel.bench.contenders import OURS, Contender, named
from mkernel.bench.guard import Guard, Progress
from mkernel.bench.problem import Problem, Tensors
from mkernel.bench.protocol import Stopwatch, stopwatch
from mkernel.bench.spec import BenchSpec, Shape
from mkernel.cases import compare, poison
from mkernel.current import current
from mkernel.errors import ArgumentError, MkernelError, Unsupported
from mkernel.launch import report
from mkernel.world import World


@dataclass
class Turns:
    """What one rank found of one contender in one row.

    Attributes:
        seconds: of each timed turn. errors: of each timed or skewed turn's output; infinite: not
            finite.
        limit: the largest error that counts as right.
        absent: why it took no part. failed: what a peer raised; it left the row then.
    """

    seconds: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    limit: float = 0.0
    absent: str | None = None
    failed: str | None = None


@dataclass
class RankResult:
    """What a rank sends back: rows in the spec's order, by contender."""

    rows: list[dict[str, Turns]]
    platform: dict[str, Any]
    clock: dict[str, Any]


class ContenderFailed(MkernelError, RuntimeError):
    """A contender raised; the message says which, where, and what it said. A peer that raises leaves
    its row (every rank's must); mkernel itself ends the run."""


def run(spec: BenchSpec, port: int) -> RankResult:
    """Measure and check one rank's part of every row. Collective.

    ``port``: of a store on this host, for the process group where the world has none.
    """
    world = current()
    device = _device(world)
    guard = Guard()
    made = not distributed.is_initialized()
    with guard.step("the process group", spec.timeout_s):
        if made:
            _join(world.rank, world.size, port, device, spec.timeout_s)
        watch = stopwatch(device, spec.launches)
    try:
        rows, turn = [], 0
        for shape in spec.shapes:
            row = _Row(spec, shape, device, watch, guard, turn)
            rows.append(row.measure())
            turn = row.turn
            if world.rank == 0:
                report(Progress(f"{shape.op} {shape.size}"))
        return RankResult(rows, provenance.devices(device), watch.settings())
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


def _join(rank: int, size: int, port: int, device: torch.device, timeout_s: float) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The guard's word comes first: it knows whose turn it was.
    wait = timedelta(seconds=3 * timeout_s)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=TCPStore("127.0.0.1", port, timeout=wait, wait_for_workers=False),
        rank=rank,
        world_size=size,
        timeout=wait,
        device_id=device if device.type == "cuda" else None,
    )


class _Row:
    """One shape: its contenders and their turns."""

    def __init__(
        self,
        spec: BenchSpec,
        shape: Shape,
        device: torch.device,
        watch: Stopwatch,
        guard: Guard,
        turn: int,
    ) -> None:
        world = current()
        self.spec, self.shape, self.watch, self.guard, self.turn = spec, shape, watch, guard, turn
        self.problem = Problem(
            op=shape.op,
            m=shape.m,
            n=shape.n,
            k=shape.k,
            dtype=spec.dtype,
            layout=spec.layout,
            seed=spec.seed,
            rank=world.rank,
            world=world.size,
            device=device,
        )
        self.found = {name: Turns() for name in spec.contenders}
        self.entered: dict[str, Contender] = {}
        self.inputs: dict[str, Tensors] = {}

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
        for name, contender in self.entered.items():
            with self._guarded(name, "closing"):
                contender.close()
        return self.found

    def _enter(self, name: str) -> None:
        kind = named(name)
        self.found[name].absent = kind.unusable(self.problem)
        if self.found[name].absent is not None:
            return
        try:
            with self._guarded(name, "setting up"):
                made = kind(self.problem)
                self.inputs[name] = made.inputs()
                self.found[name].limit = made.limit()
        except ContenderFailed as error:
            self._drop(name, error)
        else:
            self.entered[name] = made

    def _drop(self, name: str, error: ContenderFailed) -> None:
        if name in OURS:
            raise error
        self.found[name].failed = str(error)
        self.entered.pop(name, None)
        self.inputs.pop(name, None)

    def _take_turn(self, name: str, iteration: int) -> None:
        contender, problem, found = self.entered[name], self.problem, self.found[name]
        late = iteration - self.spec.iterations  # the rank that is
        what = f"iteration {iteration}" if late < 0 else f"with rank {late} late"
        self.turn += 1
        try:
            with self._guarded(name, what):
                result, seconds = self._timed(
                    name, contender, self.inputs[name], late=late == problem.rank
                )
        except (Unsupported, ArgumentError) as error:  # refused before anything was started
            found.absent = f"refused: {error}"
            del self.entered[name], self.inputs[name]
            return
        except ContenderFailed as error:
            self._drop(name, error)
            return
        if iteration < 0:
            return
        if late < 0:
            found.seconds.append(seconds)
        with self._guarded(name, f"check of {what}"):
            found.errors.append(_error(contender, problem, result, self.turn))

    def _timed(
        self, name: str, contender: Contender, inputs: Tensors, late: bool
    ) -> tuple[torch.Tensor, float]:
        problem = self.problem
        problem.fill(inputs, problem.rank, self.turn)
        out = poison.fill(contender.output())
        poison.freed([(tuple(out.shape), out.dtype)], problem.device)
        return self.watch.time(name, lambda: contender.call(inputs, out), late)

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


def _error(contender: Contender, problem: Problem, result: torch.Tensor, turn: int) -> float:
    if tuple(result.shape) != problem.out_shape(contender.kind):
        return float("inf")
    if not bool(torch.isfinite(result).all()):
        return float("inf")
    rows = problem.sampled_rows(contender.kind, turn)
    return compare(result[rows], problem.reference(contender.kind, turn, rows)).error
