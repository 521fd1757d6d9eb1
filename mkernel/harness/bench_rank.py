"""One rank of a benchmark: every mode and shape, contenders taking turns at each.

The order of the contenders alternates between iterations. At the end each rank in its turn comes late
once; these turns are checked and not timed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore

from mkernel.cases import case_of
from mkernel.errors import ArgumentError, MkernelError, Unsupported
from mkernel.harness import provenance
from mkernel.harness.clock import Meeting
from mkernel.harness.contenders import OURS, named
from mkernel.harness.guard import Guard, Progress
from mkernel.harness.problem import Problem
from mkernel.harness.protocol import Stopwatch, stopwatch
from mkernel.harness.spec import BenchSpec, Mode, Shape
from mkernel.harness.turns import Rotation, Turns
from mkernel.harness.work import PARTS, Unseen, clock, work
from mkernel.launch import report
from mkernel.world.lifecycle import current
from mkernel.world.world import World


@dataclass
class RankResult:
    """What a rank sends back: by mode, rows in the spec's order, by contender; how modes are timed;
    what carries bytes between nodes, empty for one node."""

    rows: dict[Mode, list[dict[str, Turns]]]
    platform: dict[str, Any]
    timing: dict[Mode, dict[str, Any]]
    carrier: str = ""


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
        return RankResult(rows, provenance.devices(device), timing, _carrier(world))
    finally:
        guard.close()
        if made:
            distributed.destroy_process_group()


def _device(world: World) -> torch.device:
    """The rank's device: the one that its backend chose, or, where a backend uses whatever tensors
    lie on, one for each rank: all are on this machine."""
    kind = world.accelerator.device
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    if world.accelerator.capabilities().process_group:
        count, index = module.device_count(), world.rank
        if index >= count:
            raise ArgumentError("--ranks", index + 1, f"at most {count}, the number of GPUs")
        module.set_device(index)
    return torch.device(kind, module.current_device())


def _carrier(world: World) -> str:
    if world.identity.nodes == 1:
        return ""
    return world.backends.nic or world.accelerator.capabilities().carrier


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


class _Row(Rotation):
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
        case = case_of(shape.op)(
            sizes=shape.named_sizes,
            dtype=spec.dtype,
            out_dtype=spec.dtype,
            layout=shape.layout or spec.layout,
            seed=spec.seed,
            options={"replicate_b": False},
            device=str(device),
        )
        super().__init__(
            Problem(case, world.rank, world.size, device),
            watch,
            warmup=spec.warmup,
            iterations=spec.iterations,
            late=world.size,
            turn=turn,
            sampled=True,
        )
        self.spec, self.mode, self.shape = spec, mode, shape
        self._guard, self._unseen = guard, unseen

    def measure(self) -> dict[str, Turns]:
        """All turns of all contenders."""
        for name in self.spec.contenders:
            self.found[name] = Turns()
            self._enter(name)
        return self.take_turns()

    def order(self, iteration: int) -> Iterable[str]:
        order = list(self.entered)
        return reversed(order) if iteration % 2 else order

    def _enter(self, name: str) -> None:
        kind = named(name)
        if kind.kind in PARTS and self.mode != "kernel":
            self.found[name].absent = "a part alone: timed in mode kernel"
            return
        self.found[name].absent = kind.unusable(self.problem)
        if self.found[name].absent is not None:
            return
        try:
            with self.step(name, "setting up"):
                made = work(self.mode, kind, self.problem, self._unseen)
        except ContenderFailed as error:
            self.failed(name, error)
        else:
            self.entered[name] = made

    def failed(self, name: str, error: Exception) -> None:
        """What refuses a turn, before anything was started, is absent; a peer that raises leaves the
        row."""
        if isinstance(error, (Unsupported, ArgumentError)):
            self.found[name].absent = f"refused: {error}"
        elif isinstance(error, ContenderFailed) and name not in OURS:
            self.found[name].failed = str(error)
        else:
            raise error
        self.entered.pop(name, None)

    @contextmanager
    def step(self, name: str, what: str) -> Iterator[None]:
        text = f"{name} at {self.shape.op} {self.shape.size}, {what}"
        try:
            with self._guard.step(text, self.spec.timeout_s):
                yield
        except MkernelError:
            raise
        except Exception as error:
            raise ContenderFailed(f"{text}: {type(error).__name__}: {error}") from error
