"""A world of ranks inside one process: memory, plans by hand, and a stand-in for the NIC."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mkernel.backends.accelerators.ascend import AscendAccelerator, AscendLaunch, _ascend
from mkernel.backends.accelerators.ascend.backend import record
from mkernel.backends.accelerators.ascend.machine import load_machine
from mkernel.backends.accelerators.ascend.timeline import model
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.instrumented import ModelledRun, View
from mkernel.backends.contracts.memory import PeerMemory, SymmetricMemory
from mkernel.backends.runtime import _runtime
from mkernel.backends.runtime._runtime import AbortCode, Diagnosis
from mkernel.plan.model import (
    Chunking,
    GemmShape,
    LaunchPlan,
    OpName,
    Prediction,
    Resources,
)
from mkernel.plan.order import ConsumptionOrder
from mkernel.topology.placement import Seat, Site, WorldPlacement
from mkernel.topology.routes import Rail, RouteClass, RouteTable, pair_classes

TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
LIMIT = {"float32": 1e-5, "float16": 5e-4, "bfloat16": 3e-3}
"""Relative Frobenius error allowed, by output dtype."""

PATIENCE_S = 60.0
"""How long to wait for what must end, however busy the machine is."""
SIGNALS = 4096
SIGNAL_BASE = 17
REGION = 5


def up(a: int, b: int) -> int:
    return -(-a // b)


def make_plan(
    m: int,
    n: int,
    k: int,
    *,
    op: OpName = "all_gather_gemm",
    nodes: int = 1,
    ranks_per_node: int = 1,
    dtype: str = "float16",
    out_dtype: str = "float32",
    b_layout: str = "row",
    tiles_per_chunk: int = 4,
    compute_blocks: int = 24,
    comm_blocks: int = 48,
    tile_m: int = 128,
    tile_n: int = 256,
    tile_k: int | None = None,
    step_k: int | None = None,
) -> LaunchPlan:
    world = nodes * ranks_per_node
    wide = dtype == "float32"
    tile_k = tile_k or (128 if wide else 256)
    step_k = step_k or (32 if wide else 64)
    rows = m if op == "gemm_all_reduce" else m // world
    tiles = up(rows, tile_m) * (up(k, tile_k) if op == "all_gather_gemm" else up(n, tile_n))
    if op == "gemm_all_reduce":
        tiles = up(tiles, world)
    seats = tuple(Seat(accelerator=f"ascend-sim{i}") for i in range(ranks_per_node))
    placement = WorldPlacement(sites=(Site(nodes=((0, nodes - 1),), seats=seats),))
    rail = Rail(src_nic="soft0", dst_nic="soft0", bandwidth_gbs=14.0)
    classes = [
        RouteClass(
            **ends._asdict(),
            pairs=pairs,
            kind="p2p" if ends.within else "nic",
            rails=() if ends.within else (rail,),
            bandwidth_gbs=14.0,
            latency_us=1.0,
        )
        for ends, pairs in pair_classes(placement).items()
    ]
    return LaunchPlan(
        op=op,
        shape=GemmShape(m=m, n=n, k=k),
        dtype=dtype,
        out_dtype=out_dtype,
        b_layout=b_layout,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        accelerator="ascend",
        nic="cx7" if nodes > 1 else None,
        verbs="soft" if nodes > 1 else None,
        placement=placement,
        routes=RouteTable(classes=tuple(classes)),
        chunking=Chunking(
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=tile_k,
            step_k=step_k,
            tiles_per_chunk=tiles_per_chunk,
            chunks_per_rank=up(tiles, tiles_per_chunk),
        ),
        order=ConsumptionOrder(nodes=1, ranks_per_node=world),
        resources=Resources(compute_blocks=compute_blocks, comm_blocks=comm_blocks),
        prediction=Prediction(
            compute_us=1, comm_us=1, sequential_us=2, pipelined_us=1, constants="none"
        ),
    )


def geometry(plan: LaunchPlan) -> _ascend.AgGemmGeometry:
    """Where a plan's staging slots and signals lie."""
    chunking = plan.chunking
    return _ascend.AgGemmGeometry(
        world=plan.world_size,
        m_local=plan.shape.m // plan.world_size,
        n=plan.shape.n,
        k=plan.shape.k,
        dtype=plan.dtype,
        tile_m=chunking.tile_m,
        tile_n=chunking.tile_n,
        tile_k=chunking.tile_k,
        step_k=chunking.step_k,
        tiles_per_chunk=chunking.tiles_per_chunk,
    )


def reduce_geometry(plan: LaunchPlan) -> _ascend.GemmReduceGeometry:
    """Where the slots and signals of a plan that reduces lie."""
    return _ascend.GemmReduceGeometry(
        world=plan.world_size,
        m=plan.shape.m,
        n=plan.shape.n,
        k=plan.shape.k,
        dtype=plan.dtype,
        out_dtype=plan.out_dtype,
        replicated=plan.op == "gemm_all_reduce",
        **plan.chunking.model_dump(exclude={"chunks_per_rank"}),
    )


class _Slot(ctypes.Structure):
    _fields_ = (
        ("local", ctypes.c_uint64),
        ("remote", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("peer", ctypes.c_uint32),
        ("region", ctypes.c_uint32),
        ("signal", ctypes.c_uint32),
        ("value", ctypes.c_uint32),
        ("reserved", ctypes.c_uint64 * 2),
        ("commit", ctypes.c_uint64),
    )


class _Device(ctypes.Structure):
    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("head", ctypes.c_void_p),
        ("tail", ctypes.c_void_p),
        ("waiting", ctypes.c_void_p),
        ("sleeping", ctypes.c_void_p),
        ("capacity", ctypes.c_uint64),
        ("wake_fd", ctypes.c_int),
    )


@dataclass
class Put:
    peer: int
    region: int
    nbytes: int
    signal: int
    value: int


class Fifo:
    """The ring of one rank as kernels see it (nics/fifo_device.hpp), drained by polling."""

    def __init__(self, capacity: int = 16) -> None:
        self.capacity = capacity
        self.slots = (_Slot * capacity)()
        self.words = (ctypes.c_uint64 * 4)()
        at = ctypes.addressof(self.words)
        self.device = _Device(
            ctypes.addressof(self.slots), at, at + 8, at + 16, at + 24, capacity, -1
        )
        self.next = 0

    @property
    def address(self) -> int:
        return ctypes.addressof(self.device)

    def pop(self) -> _Slot | None:
        slot = self.slots[self.next % self.capacity]
        if slot.commit >> 63 != (self.next // self.capacity + 1) & 1:
            return None
        return slot

    def release(self) -> None:
        self.next += 1
        self.words[1] = self.next


@dataclass
class Rank:
    pad: SymmetricMemory
    workspace: SymmetricMemory
    fifo: Fifo


@dataclass
class World:
    """All ranks of a plan in this process. Use as a context manager."""

    plan: LaunchPlan
    slots: int | None = None
    fifo_slots: int = 16
    strict: _ascend.Strict | None = None
    ranks: list[Rank] = field(default_factory=list)
    puts: list[tuple[int, Put]] = field(default_factory=list)
    epoch: int = 0

    def __post_init__(self) -> None:
        self.backend = AscendAccelerator(slots=self.slots, strict=self.strict)
        need = self.backend.workspace(self.plan)
        assert SIGNAL_BASE + need.signals <= SIGNALS
        for _ in range(self.plan.world_size):
            pad = self.backend.allocate(_runtime.pad_bytes(SIGNALS))
            _runtime.pad_format(pad.address, SIGNALS)
            self.ranks.append(
                Rank(pad, self.backend.allocate(max(need.nbytes, 1)), Fifo(self.fifo_slots))
            )
        self._launches: list[AscendLaunch] = []
        self._stop = threading.Event()
        self._nic = threading.Thread(target=self._drain, daemon=True)
        self._nic.start()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:  # what a test that failed left running, before its memory goes
            _runtime.pad_abort(rank.pad.address, AbortCode.cancelled)
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
                while (slot := rank.fifo.pop()) is not None:
                    idle = False
                    target = self.ranks[slot.peer]
                    ctypes.memmove(
                        target.workspace.address + slot.remote,
                        rank.workspace.address + slot.local,
                        slot.bytes,
                    )
                    _runtime.pad_add(target.pad.address, slot.signal, slot.value)
                    self.puts.append(
                        (source, Put(slot.peer, slot.region, slot.bytes, slot.signal, slot.value))
                    )
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

    def add(self, rank: int, signal: int, value: int = 1) -> None:
        """Raise one of the plan's signals at a rank, as a peer would."""
        _runtime.pad_add(self.ranks[rank].pad.address, SIGNAL_BASE + signal, value)

    def outcome(self, rank: int) -> tuple[AbortCode, Diagnosis]:
        """Why a rank's call ended: the pad's abort record."""
        return _runtime.pad_outcome(self.ranks[rank].pad.address)

    def abort(self, rank: int, code: AbortCode) -> None:
        """End a rank's call, as the world does."""
        _runtime.pad_abort(self.ranks[rank].pad.address, code)

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
    ) -> AscendLaunch:
        node = self.plan.placement[rank].node
        peers = {
            r: PeerMemory(self.ranks[r].pad.address, self.ranks[r].workspace.address)
            for r in range(self.plan.world_size)
            if r != rank and self.plan.placement[r].node == node
        }
        own = self.ranks[rank]
        started = self.backend.launch(
            Call(
                plan=self.plan,
                rank=rank,
                tensors=tensors,
                epoch=self.epoch,
                number=100 + self.epoch,
                pad=own.pad.address,
                workspace=own.workspace.address,
                signal_base=SIGNAL_BASE,
                peers=peers,
                region=REGION,
                fifo=own.fifo.address if self.plan.nodes > 1 and with_fifo else 0,
                timeout_s=timeout_s,
                view=view,
                trace=trace,
                options=options or {},
            )
        )
        self._launches.append(started)
        return started

    def tensors(self, seed: int) -> list[dict[str, torch.Tensor]]:
        """Fresh random inputs and NaN-filled outputs of every rank."""
        plan, made = self.plan, []
        part = plan.shape.m // plan.world_size
        rows_of_a = part if plan.op == "all_gather_gemm" else plan.shape.m
        rows_of_out = part if plan.op == "gemm_reduce_scatter" else plan.shape.m
        generator = torch.Generator().manual_seed(seed)
        dtype = TORCH[plan.dtype]
        for _ in range(plan.world_size):
            a = torch.randn(rows_of_a, plan.shape.k, generator=generator).to(dtype)
            if plan.b_layout == "row":
                b = torch.randn(plan.shape.k, plan.shape.n, generator=generator).to(dtype)
            else:
                b = torch.randn(plan.shape.n, plan.shape.k, generator=generator).to(dtype).t()
            out = torch.full((rows_of_out, plan.shape.n), float("nan"), dtype=TORCH[plan.out_dtype])
            made.append({"a": a, "b": b, "out": out})
        return made

    def call(
        self, tensors: list[dict[str, torch.Tensor]], *, view: View = "pipelined"
    ) -> list[torch.Tensor]:
        """One epoch on all ranks; the outputs."""
        self.epoch += 1
        launches = [self.launch(r, t, view=view) for r, t in enumerate(tensors)]
        for rank, launch in enumerate(launches):
            assert launch.wait(PATIENCE_S), f"rank {rank} did not return"
            assert self.outcome(rank)[0] == AbortCode.none, self.outcome(rank)
        return [t["out"] for t in tensors]

    def epochs(
        self, count: int, views: tuple[View, ...] = ("pipelined",)
    ) -> Iterator[tuple[int, list[dict[str, torch.Tensor]]]]:
        """Calls one after another, each with fresh inputs; outputs and workspaces start as NaN. The
        epoch and the tensors of each that has results to judge."""
        self.poison()
        for i in range(count):
            tensors = self.tensors(seed=1000 + i)
            view = views[i % len(views)]
            self.call(tensors, view=view)
            if view != "compute_only":
                yield self.epoch, tensors


def modelled_views(plan: LaunchPlan) -> tuple[ModelledRun, ModelledRun, ModelledRun]:
    """A plan on the modelled machine: compute alone, sequential, pipelined."""
    traces = [record(plan, rank) for rank in range(plan.world_size)]
    machine = load_machine()
    return (
        model(traces, machine, "compute_only"),
        model(traces, machine, "sequential"),
        model(traces, machine, "pipelined"),
    )


def error(tensors: list[dict[str, torch.Tensor]], rank: int) -> float:
    """Relative Frobenius error of a rank's output against float64."""
    a = np.concatenate([t["a"].float().numpy().astype(np.float64) for t in tensors])
    want = a @ tensors[rank]["b"].float().numpy().astype(np.float64)
    got = tensors[rank]["out"].float().numpy().astype(np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def sum_errors(plan: LaunchPlan, tensors: list[dict[str, torch.Tensor]]) -> list[float]:
    """The same of every rank, for ops that sum over ranks."""
    whole = sum(t["a"].double().numpy() @ t["b"].double().numpy() for t in tensors)
    wanted = [whole] * plan.world_size
    if plan.op == "gemm_reduce_scatter":
        wanted = np.split(whole, plan.world_size)
    return [
        float(np.linalg.norm(t["out"].double().numpy() - want) / np.linalg.norm(want))
        for t, want in zip(tensors, wanted, strict=True)
    ]
