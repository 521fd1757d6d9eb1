"""A world of ranks inside one process: memory, plans by hand, and a stand-in for the NIC."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from mkernel import api
from mkernel.backends.accelerators.ascend import AscendAccelerator, AscendLaunch, _ascend
from mkernel.backends.accelerators.ascend.backend import record
from mkernel.backends.accelerators.ascend.gemm import GemmOp
from mkernel.backends.accelerators.ascend.machine import Machine, load_machine
from mkernel.backends.accelerators.ascend.schedule import cores as cores_of
from mkernel.backends.accelerators.ascend.timeline import model
from mkernel.backends.accelerators.ascend.trace import Kind, Records, cores
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.instrumented import ModelledRun, Track, View
from mkernel.backends.contracts.memory import PeerMemory, SymmetricMemory
from mkernel.backends.transport import _transport
from mkernel.backends.transport._transport import AbortCode, Diagnosis
from mkernel.cases import case_of, poison
from mkernel.cases.base import Case
from mkernel.cases.comparison import Comparison
from mkernel.plan.model import LaunchPlan, OpName
from mkernel.plan.pipeline import USUAL_TILE, GemmTile
from mkernel.plan.standard import cut
from mkernel.world.memory import Arena

SCALE = 0.11
"""Of attention's scores."""

Tensors = list[dict[str, torch.Tensor]]
"""Of each rank, by name."""

PATIENCE_S = 240.0
"""How long to wait for what must end, however busy the machine is."""
SIGNALS = 8192
REGION = 5


def planned(
    op: OpName,
    sizes: Mapping[str, int],
    *,
    compute_blocks: int = 24,
    comm_blocks: int = 48,
    **options: Any,
) -> LaunchPlan:
    """The planner's plan of a call on simulated chips, which takes ``options``; but for the cores."""
    made = api.plan(op, accelerator="ascend", nic="cx7", verbs="soft", **sizes, **options)
    return scheduled(made, **cores_of(op, compute_blocks, comm_blocks, A3.aiv_cores))


def scheduled(plan: LaunchPlan, **fields: Any) -> LaunchPlan:
    """The plan with other fields of its schedule."""
    assert plan.schedule is not None
    return plan.model_copy(update={"schedule": plan.schedule.model_copy(update=fields)})


def make_plan(
    m: int,
    n: int,
    k: int,
    *,
    op: OpName = "all_gather_gemm",
    tiles_per_chunk: int = 4,
    tile: GemmTile = USUAL_TILE,
    **options: Any,
) -> LaunchPlan:
    """A GEMM op's plan, cut by hand; ``options`` as :func:`planned` takes them."""
    made = planned(op, {"m": m, "n": n, "k": k}, **options)
    chunking = cut(op, made.gemm, made.world_size, made.dtype, tiles_per_chunk, tile)
    return scheduled(made, chunking=chunking)


def geometry(plan: LaunchPlan) -> Any:
    """Where a GEMM plan's slots and signals lie."""
    return GemmOp().geometry(plan)


def case_for(plan: LaunchPlan, **options: Any) -> Case:
    """Inputs and truth of a plan's calls."""
    return case_of(plan.op)(
        sizes=plan.shape.model_dump(exclude={"kind"}),
        dtype=plan.dtype,
        out_dtype=plan.out_dtype,
        layout=plan.b_layout,
        options=options,
    )


@dataclass
class Put:
    peer: int
    region: int
    nbytes: int
    signal: int
    value: int


@dataclass
class Rank:
    pad: SymmetricMemory
    workspace: SymmetricMemory
    fifo: _transport.Fifo


@dataclass
class World:
    """All ranks of a plan in this process; ``plan`` may become one of the ``others``, which share its
    memory and words. Use as a context manager."""

    plan: LaunchPlan
    others: Sequence[LaunchPlan] = ()
    slots: int | None = None
    fifo_slots: int = 16
    strict: _ascend.Strict | None = None
    ranks: list[Rank] = field(default_factory=list)
    puts: list[tuple[int, Put]] = field(default_factory=list)
    epoch: int = 0

    def __post_init__(self) -> None:
        self.backend = AscendAccelerator(slots=self.slots, strict=self.strict)
        needs = [self.backend.workspace(plan) for plan in (self.plan, *self.others)]
        assert max(need.signals for need in needs) <= SIGNALS
        self.arena = Arena([max(sizes) for sizes in zip(*(n.areas for n in needs), strict=True)])
        for _ in range(self.plan.world_size):
            pad = self.backend.allocate(_transport.pad_bytes(SIGNALS))
            _transport.pad_format(pad.address, SIGNALS)
            workspace = self.backend.allocate(self.arena.nbytes)
            self.ranks.append(Rank(pad, workspace, _transport.Fifo(self.fifo_slots)))
        self.take(self.plan)
        self._launches: list[AscendLaunch] = []
        self._stop = threading.Event()
        self._nic = threading.Thread(target=self._drain, daemon=True)
        self._nic.start()

    def take(self, plan: LaunchPlan) -> None:
        """The next calls are this plan's."""
        self.plan = plan
        self.options = {"scale": SCALE} if plan.op == "ring_attention" else {}
        self.case = case_for(plan, replicate_b=False, **self.options)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:  # what a test that failed left running, before its memory goes
            _transport.pad_abort(rank.pad.address, AbortCode.cancelled)
        for launch in self._launches:
            with suppress(
                RuntimeError
            ):  # the launch's own failure has been judged, or is the test's
                launch.wait(PATIENCE_S)
        self._stop.set()
        self._nic.join()
        for rank in self.ranks:
            rank.pad.close()
            rank.workspace.close()

    def _drain(self) -> None:
        while not self._stop.is_set():
            idle = True
            for source, rank in enumerate(self.ranks):
                while (command := rank.fifo.pop(0.0)) is not None:
                    idle = False
                    peer, region, local, remote, nbytes, signal, value = command
                    target = self.ranks[peer]
                    ctypes.memmove(
                        target.workspace.address + remote, rank.workspace.address + local, nbytes
                    )
                    _transport.pad_add(target.pad.address, signal, value)
                    self.puts.append((source, Put(peer, region, nbytes, signal, value)))
                    rank.fifo.release()
            if idle:
                time.sleep(0.0005)

    @staticmethod
    def view(memory: SymmetricMemory) -> ctypes.Array[ctypes.c_ubyte]:
        """The bytes of a symmetric allocation, in place."""
        return (ctypes.c_ubyte * memory.nbytes).from_address(memory.address)

    def bytes_of(self, rank: int) -> ctypes.Array[ctypes.c_ubyte]:
        """A rank's workspace, in place."""
        return self.view(self.ranks[rank].workspace)

    def add(self, rank: int, word: int, value: int = 1) -> None:
        """Add to a word at a rank, as a peer would."""
        _transport.pad_add(self.ranks[rank].pad.address, word, value)

    def outcome(self, rank: int) -> tuple[AbortCode, Diagnosis]:
        """Why a rank's call ended: the pad's abort record."""
        record = _transport.pad_record(self.ranks[rank].pad.address)
        return _transport.record_outcome(record) or (AbortCode.none, Diagnosis())

    def abort(self, rank: int, code: AbortCode) -> None:
        """End a rank's call, as the world does."""
        _transport.pad_abort(self.ranks[rank].pad.address, code)

    def poison(self) -> None:
        """Fill every workspace with NaN (any dtype)."""
        for rank in self.ranks:
            ctypes.memset(rank.workspace.address, 0xFF, rank.workspace.nbytes)

    def launch(
        self,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        view: View = "pipelined",
        trace: bool = False,
        timeout_s: float = PATIENCE_S,
        with_fifo: bool = True,
        options: Mapping[str, Any] | None = None,
        plan: LaunchPlan | None = None,
        epoch: int | None = None,
    ) -> AscendLaunch:
        plan, epoch = plan or self.plan, epoch or self.epoch
        node = plan.placement[rank].node
        peers = {
            r: PeerMemory(self.ranks[r].pad.address, self.ranks[r].workspace.address)
            for r in range(plan.world_size)
            if r != rank and plan.placement[r].node == node
        }
        own = self.ranks[rank]
        started = self.backend.launch(
            Call(
                plan=plan,
                rank=rank,
                tensors=tensors,
                epoch=epoch,
                number=100 + epoch,
                pad=own.pad.address,
                workspace=own.workspace.address,
                areas=self.arena.offsets,
                peers=peers,
                region=REGION,
                fifo=own.fifo.handle if plan.nodes > 1 and with_fifo else 0,
                timeout_s=timeout_s,
                view=view,
                trace=trace,
                options=options or self.options,
            )
        )
        self._launches.append(started)
        return started

    def alone(
        self, rank: int, tensors: Mapping[str, torch.Tensor], **how: Any
    ) -> tuple[AbortCode, Diagnosis]:
        """How a first call ends for which no other rank comes."""
        self.epoch = 1
        assert self.launch(rank, tensors, timeout_s=0.3, **how).wait(PATIENCE_S)
        return self.outcome(rank)

    def tensors(self, seed: int) -> Tensors:
        """Fresh random inputs and poisoned outputs of every rank."""
        self.seed = seed
        outputs = self.case.results(self.plan.world_size)
        return [
            {
                **self.case.inputs(rank, self.plan.world_size, seed),
                **{name: poison.full(*memory, "cpu") for name, memory in outputs.items()},
            }
            for rank in range(self.plan.world_size)
        ]

    def call(self, tensors: Tensors, *, view: View = "pipelined") -> list[torch.Tensor]:
        """One epoch on all ranks; the outputs."""
        self.epoch += 1
        launches = [self.launch(r, t, view=view) for r, t in enumerate(tensors)]
        for rank, launch in enumerate(launches):
            assert launch.wait(PATIENCE_S), f"rank {rank} did not return"
            assert self.outcome(rank)[0] == AbortCode.none, self.outcome(rank)
        return [own[name] for own in tensors for name in self.case.results(self.plan.world_size)]

    def check(self, epochs: int = 1) -> None:
        """Calls one after another, each with fresh inputs, on workspaces that start as NaN: results
        are right on every rank."""
        self.poison()
        for i in range(epochs):
            tensors = self.tensors(seed=1000 + i)
            self.call(tensors)
            for rank, found in enumerate(self.compared(tensors)):
                assert self.case.passed(found), f"rank {rank}, epoch {self.epoch}: {found}"

    def compared(self, tensors: Tensors) -> list[dict[str, Comparison]]:
        """Every rank's outputs beside float64."""
        return [
            self.case.compared(own, rank, self.plan.world_size, self.seed)
            for rank, own in enumerate(tensors)
        ]

    def errors(self, tensors: Tensors) -> list[float]:
        """How far every rank's ``out`` is off."""
        return [found["out"].error for found in self.compared(tensors)]


A3 = load_machine()


def traces(plan: LaunchPlan) -> list[bytes]:
    """What every rank of a plan would leave."""
    return [record(plan, rank) for rank in range(plan.world_size)]


class Views(NamedTuple):
    """A plan's call on a modelled machine."""

    alone: ModelledRun
    sequential: ModelledRun
    pipelined: ModelledRun


def modelled_views(plan: LaunchPlan, machine: Machine = A3) -> Views:
    """All views of one record."""
    recorded = traces(plan)
    views: tuple[View, ...] = ("compute_only", "sequential", "pipelined")
    return Views(*(model(recorded, machine, view) for view in views))


def changed(**parts: dict[str, float]) -> Machine:
    """The default machine with some fields replaced."""
    data = A3.model_dump()
    for part, fields in parts.items():
        data[part].update(fields)
    return Machine.model_validate(data)


def slices_follow_each_other(track: Track, total_us: float) -> bool:
    """In the time that the run took."""
    end = 0.0
    for each in track.spans:
        if each.duration_us < 0 or each.start_us < end - 1e-6:
            return False
        end = each.start_us + each.duration_us
    return end <= total_us + 1e-6


def first(blob: bytearray, kind: Kind) -> Records:
    """The first record of a kind, in place."""
    records = next(own for _, own in cores(blob) if kind in own["kind"])
    at = int(np.flatnonzero(records["kind"] == kind)[0])
    return records[at : at + 1]


def same_bits(results: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether several runs gave the same tensors."""
    return all(
        torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True)
    )
