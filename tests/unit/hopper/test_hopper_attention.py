"""Ring attention's part on the host: ranks are threads, copies and kernels stand-ins on host memory
that do as host/attention/transfers.hpp and kernels/attention/parts.hpp say."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from gpu_plans import gpu_plan
from hopper_calls import gpus
from plan_walk import WalkedWorld, decorations

from mkernel.backends.accelerators.cuda import capabilities, device_world
from mkernel.backends.accelerators.cuda import native_kernels as native
from mkernel.backends.accelerators.cuda.attention import in_parts as attention
from mkernel.backends.accelerators.cuda.attention import merge as attention_merge
from mkernel.backends.accelerators.cuda.attention import ring as attention_ring
from mkernel.backends.accelerators.cuda.attention.in_parts import AttentionExecutor
from mkernel.backends.accelerators.cuda.attention.library import Seen
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.accelerators.cuda.schedule import AttentionSchedule
from mkernel.backends.accelerators.hopper.attention import core as attention_core
from mkernel.backends.accelerators.hopper.attention import tuning as attention_tuning
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.dispatch import Executor, executor_of
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.instrumented import View
from mkernel.backends.contracts.memory import PeerMemory
from mkernel.cases import case_of
from mkernel.cases.comparison import compare
from mkernel.errors import BackendUnavailable, LayoutError, ShapeError, Unsupported
from mkernel.plan.missing import of_op
from mkernel.plan.model import LaunchPlan
from mkernel.plan.shapes import takes

MAIN, BESIDE, KERNELS = 5, 6, 7
DATA_OFFSET = 1 << 20
Sizes = dict[str, Any]


class Part(NamedTuple):
    out: int
    strides: tuple[int, ...]
    lse: int
    first: int


class Running(NamedTuple):
    out: int
    lse: int
    read: bool
    write: bool


class Merge(NamedTuple):
    parts: list[Part]
    out: int
    strides: tuple[int, ...]
    lse: int
    lse_pitch: int
    shape: tuple[int, int, int, int]
    half: bool
    running: Running


@dataclass(frozen=True)
class Here:
    """Stands for DeviceWorld."""

    rank: int
    workspaces: tuple[int, ...]
    number: int = 0

    def of_call(self, number: int, timeout_s: float) -> Here:
        return replace(self, number=number)


class Keys(NamedTuple):
    """Stands for the native one in a build without it: slots in the order in which they are read."""

    bytes: int
    width: int
    pitch: int
    count: int

    def slot_offset(self, world: int, local: int, rank: int, source: int) -> int:
        others = [(rank - step) % world for step in range(1, world)]
        order = sorted(others, key=lambda other: other // local != rank // local)
        return 2 * self.bytes * order.index(source)

    def gradient_offset(self, world: int, rank: int, from_rank: int) -> int:
        return 2 * self.bytes * (world - 1 + (from_rank - rank - 1) % world)

    def area_bytes(self, world: int) -> int:
        return 2 * self.bytes * world

    def workspace_bytes(self, world: int, gradients: bool = False) -> int:
        return DATA_OFFSET + 2 * self.bytes * (world - 1) * (2 if gradients else 1)


class Crossing(NamedTuple):
    """Stands for KeysCrossing: strided keys and values [batch, heads, rows, width], rows of a chunk,
    blocks that send."""

    tensors: list[tuple[int, tuple[int, ...]]]
    shape: tuple[int, ...]
    rows: int
    blocks: int
    causal: bool
    hierarchical: bool

    @property
    def chunks(self) -> int:
        batch, heads, rows, _ = self.shape
        return batch * heads * -(-rows // self.rows)


class Fabric:
    """Stands for ``_kernels`` in all ranks. ``queued``: what rank 0 started, and on which stream."""

    Part, Merge, Running = Part, Merge, Running
    NETWORK_WORDS = 32

    def __init__(self, world: int) -> None:
        self.DATA_OFFSET, self.Keys = DATA_OFFSET, Keys
        with suppress(BackendUnavailable):
            built = native.native()
            self.DATA_OFFSET, self.Keys = built.DATA_OFFSET, built.Keys
        self.world = world
        self.nbytes = self.stretches = 0  # of one rank's keys
        self.places: list[int] = []  # of ranks' workspaces, for what stands for the NIC
        self.chunks = 1  # of a rank's keys
        self.queued: list[Any] = []
        self.merged: list[Merge] = []
        self.flags: dict[tuple[int, int], threading.Event] = {
            (to, by): threading.Event() for to in range(world) for by in range(world)
        }

    def clear(self) -> None:
        """Another call begins."""
        for flag in self.flags.values():
            flag.clear()

    def load_attention(self, device: int) -> None:
        """Nothing is loaded late."""

    def DeviceNetwork(self, *_: Any) -> Any:
        return SimpleNamespace(of=lambda *_: None)

    def DeviceWorld(self, workspaces: list[int], rank: int, *_: Any) -> Here:
        return Here(rank, tuple(workspaces))

    def push_keys(
        self, device: int, here: Here, k: int, v: int, keys: Any, zigzag: bool, chunk: int,
        stream: int,
    ) -> None:  # fmt: skip
        self._note(here, "push", stream)
        whole, self.chunk = self.nbytes, chunk
        for step in range(1, self.world):
            to = (here.rank + step) % self.world
            at = here.workspaces[to] + self.DATA_OFFSET
            at += keys.slot_offset(self.world, self.world, to, here.rank)
            for number, source in enumerate((k, v)):
                pitch = whole // self.stretches
                width = pitch // 2 if zigzag and to > here.rank else pitch
                for stretch in range(self.stretches):
                    off = stretch * pitch
                    ctypes.memmove(at + number * whole + off, source + off, width)
            self.flags[to, here.rank].set()

    def KeysCrossing(
        self, tensors: Any, shape: tuple[int, ...], rows: int, blocks: int, *rest: bool
    ) -> Crossing:
        made = Crossing(tensors, shape, rows, blocks, *rest)
        self.chunks = made.chunks
        return made

    def cross_keys(
        self, device: int, here: Here, crossing: Crossing, blocks: int, stream: int
    ) -> None:
        self._note(here, ("cross", crossing.rows, crossing.blocks, blocks), stream)
        local = sum(map(bool, here.workspaces))
        keys = self.Keys(bytes=self.nbytes, width=1, pitch=1, count=1)
        batch, heads, rows, width = crossing.shape
        packed = (heads * rows * width, rows * width, width)
        for to in (rank for rank in range(self.world) if rank != here.rank):
            at = self.places[to] + self.DATA_OFFSET
            at += keys.slot_offset(self.world, local, to, here.rank)
            sees = rows // 2 if crossing.causal and here.rank < to else rows
            for number, (source, strides) in enumerate(crossing.tensors):
                given = rows_at(source, strides, torch.int16, batch, heads, sees, width)
                slot = at + number * self.nbytes
                rows_at(slot, packed, torch.int16, batch, heads, sees, width).copy_(given)
            self.flags[to, here.rank].set()

    def await_crossing(self, device: int, here: Here, stream: int) -> None:
        self._note(here, "await crossing", stream)

    def await_part(
        self, device: int, here: Here, source: int, flag: int, stream: int, **which: int
    ) -> None:
        self._note(here, ("await", source, *which.values()), stream)
        assert flag == source * self.chunks
        assert self.flags[here.rank, source].wait(60)

    def merge_parts(
        self, device: int, here: Here, merge: Merge, blocks: int, ends: bool, stream: int
    ) -> None:
        self._note(here, ("merge", len(merge.parts), blocks, ends), stream)
        if here.rank == 0:
            self.merged.append(merge)
        batch, heads, rows, width = merge.shape
        dtype = torch.float16 if merge.half else torch.bfloat16
        outs = torch.zeros(len(merge.parts) + 1, batch, heads, rows, width)
        sums = torch.full((len(merge.parts) + 1, batch, heads, rows), float("-inf"))
        packed = (heads * rows, rows, 1)
        before = merge.running
        if before.read:
            wide = tuple(width * each for each in packed)
            outs[-1] = rows_at(before.out, wide, torch.float32, batch, heads, rows, width)
            sums[-1] = rows_at(before.lse, packed, torch.float32, batch, heads, rows, 1)[..., 0]
        for number, part in enumerate(merge.parts):
            left = rows - part.first
            outs[number, :, :, part.first :] = rows_at(part.out, part.strides, dtype, batch, heads,
                                                       left, width).float()  # fmt: skip
            lse = rows_at(part.lse, (heads * left, left, 1), torch.float32, batch, heads, left, 1)
            sums[number, :, :, part.first :] = lse[..., 0]
        lse = sums.logsumexp(0)
        out = ((sums - lse).exp()[..., None] * outs).sum(0)
        pitch = merge.lse_pitch
        to, strides, sums_to, pitches = (
            merge.out,
            merge.strides,
            merge.lse,
            (heads * pitch, pitch, 1),
        )
        if before.write:
            wide = tuple(width * each for each in packed)
            to, strides, sums_to, pitches, dtype = (
                before.out,
                wide,
                before.lse,
                packed,
                torch.float32,
            )
        rows_at(to, strides, dtype, batch, heads, rows, width).copy_(out)
        rows_at(sums_to, pitches, torch.float32, batch, heads, rows, 1)[..., 0].copy_(lse)

    def _note(self, here: Here, what: Any, stream: int) -> None:
        if here.rank == 0:
            self.queued.append((what, stream))


def flat_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def rows_at(
    address: int, strides: tuple[int, ...], dtype: torch.dtype, *shape: int
) -> torch.Tensor:
    steps = (*strides, 1)
    last = sum((size - 1) * step for size, step in zip(shape, steps, strict=True)) + 1
    flat = flat_at(address, last * dtype.itemsize).view(dtype)
    return flat.as_strided(shape, steps)


class Order:
    """Stands for CallOrder."""

    def __init__(self) -> None:
        self.open = 0

    def fork(self, stream: int) -> int:
        assert stream in (MAIN, KERNELS)
        self.open += stream == MAIN
        return BESIDE

    def fork_kernels(self, stream: int) -> int:
        assert stream == MAIN
        self.open += 1
        return KERNELS

    def join_kernels(self, stream: int) -> None:
        self.join(stream)

    def join(self, stream: int) -> None:
        assert stream == MAIN
        self.open -= 1

    def announce_to(self, fifo: int) -> None:
        """Calls of the fabric wait for no proxy."""


def decorations_of(
    world: WalkedWorld, usual: LaunchPlan, tensors: dict[str, Any], started: Any
) -> list[str]:
    """:func:`decorations` of a plan of two ranks. ``started``: notes what calls ask of native code."""
    order: Any = Order()

    def launch(plan: LaunchPlan) -> object:
        started.told.clear()
        world.admit(plan, tensors)
        needs = world.accelerator.workspace(plan)
        call = Call(
            plan=plan, rank=1, tensors=tensors, epoch=1, number=1, pad=0, workspace=1 << 30,
            areas=(0,), peers={0: PeerMemory(0, 1 << 31)}, region=0, fifo=0, timeout_s=1.0,
            options={"scale": 0.1},
        )  # fmt: skip
        executor_of(plan)(call, DispatchContext(0, order, 64)).start(call, MAIN)
        return [needs, *started.told]

    return decorations(usual, launch)


class Current(threading.local):
    """torch's current stream."""

    stream = MAIN


CURRENT = Current()


@contextmanager
def on_stream(device: int, stream: int) -> Iterator[None]:
    """Stands for that of :mod:`.attention.library`."""
    CURRENT.stream = stream
    yield
    CURRENT.stream = MAIN


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, causal: bool, scale: float
) -> Seen:
    """As a library's, on the CPU: rounded once."""
    assert scale > 0
    groups = q.shape[1] // k.shape[1]
    wide, keys, values = q[:, :, first:].double(), k.double(), v.double()
    scores = wide @ keys.repeat_interleave(groups, 1).transpose(2, 3) * scale
    if causal:
        assert not first
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    out = scores.softmax(3) @ values.repeat_interleave(groups, 1)
    return Seen(out.to(q.dtype), scores.logsumexp(3).float(), first)


def sizes_of(world: int, **changes: Any) -> Sizes:
    return {
        "batch": 2, "heads": 4, "kv_heads": 2, "sequence": 32 * world, "head_dim": 64,
        "causal": False, **changes,
    }  # fmt: skip


def planned(world: int, **changes: Any) -> LaunchPlan:
    claims = HopperAccelerator().capabilities()
    ops = (*capabilities.OPS, *capabilities.ATTENTION)
    return gpu_plan(
        HopperAccelerator(), "ring_attention", world, sizes_of(world, **changes), dtype="bfloat16",
        capabilities=claims.model_copy(update={"ops": ops}),
    )  # fmt: skip


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Fabric]:
    """Makes the fabric of a world."""

    def make(world: int) -> Fabric:
        made = Fabric(world)
        for module in (attention, attention_merge, attention_ring, device_world):
            monkeypatch.setattr(module, "native", lambda: made)
        monkeypatch.setattr(attention, "attend", attended)
        monkeypatch.setattr(attention, "on_stream", on_stream)
        monkeypatch.setattr(attention_ring, "bytes_at", flat_at)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        return made

    return make


def lying(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "heads":
        return tensor.contiguous()
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def run(
    made: Fabric, plan: LaunchPlan, *, view: View = "pipelined", scale: float = 0.2, calls: int = 2,
    cu_seqlens: tuple[int, ...] | None = None,
) -> list[str]:  # fmt: skip
    """What is wrong with any rank's results, of calls with fresh inputs each."""
    shape: Any = plan.shape
    world, sizes = plan.world_size, shape.model_dump(exclude={"kind", "layout", "documents"})
    case = case_of("ring_attention")(
        sizes, plan.dtype, plan.dtype, "row", seed=3,
        options={"scale": scale, "cu_seqlens": cu_seqlens},
    )  # fmt: skip
    room = executor_of(plan).workspace(plan).areas[0]
    memory = [torch.full((room,), 0x7F, dtype=torch.uint8) for _ in range(world)]  # NaN
    places = made.places = [each.data_ptr() for each in memory]
    node = [rank // plan.ranks_per_node for rank in range(world)]
    rows = shape.sequence // world
    made.nbytes = shape.batch * shape.kv_heads * rows * shape.head_dim * 2
    made.stretches = shape.batch * (shape.kv_heads if shape.layout == "heads" else 1)
    order: Any = Order()
    found: list[str] = []
    executors: dict[int, Executor] = {}
    for number in range(calls):
        made.clear()

        def start(rank: int, number: int = number) -> list[str]:
            given = {n: lying(t, shape.layout) for n, t in case.inputs(rank, world, number).items()}
            given["out"] = torch.full_like(given["q"], torch.nan)
            given["lse"] = torch.full(given["q"].shape[:3], torch.nan)
            if cu_seqlens is not None:
                given["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32)
            call = Call(
                plan=plan, rank=rank, tensors=given, epoch=number + 1, number=number, pad=0,
                workspace=places[rank], areas=(0,),
                peers={
                    p: PeerMemory(0, places[p])
                    for p in range(world) if p != rank and node[p] == node[rank]
                },
                region=0, fifo=0, timeout_s=1.0, view=view, options={"scale": scale},
            )  # fmt: skip
            if rank not in executors:
                executors[rank] = executor_of(plan)(call, DispatchContext(0, order, 64))
            executors[rank].start(call, MAIN)
            truth = case.reference(rank, world, number)
            limits = {"out": 5e-3, "lse": 1e-5}
            return [
                f"call {number} rank {rank}: {name} is off by {off}"
                for name, limit in limits.items()
                if not (off := compare(given[name], truth[name]).error) <= limit
            ]

        with ThreadPoolExecutor(world) as pool:
            found += [text for each in pool.map(start, range(world)) for text in each]
    assert order.open == 0
    return found


@pytest.mark.parametrize("layout", ["heads", "positions"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results(fabric: Any, world: int, causal: bool, layout: str) -> None:
    made = fabric(world)
    plan = planned(world, causal=causal, layout=layout, sequence=64 * world)
    assert run(made, plan) == []


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_any_scale(fabric: Any, scale: float) -> None:
    assert run(fabric(2), planned(2, causal=True), scale=scale) == []


@pytest.mark.parametrize("view", ["pipelined", "sequential"])
def test_what_is_queued(fabric: Any, view: View) -> None:
    made = fabric(3)
    plan = planned(3, causal=True, sequence=96)
    assert run(made, plan, view=view, calls=1) == []
    blocks = plan.part(AttentionSchedule).merge_blocks
    beside, kernels = (BESIDE, KERNELS) if view == "pipelined" else (MAIN, MAIN)
    assert made.queued == [
        ("push", beside), (("await", 2), kernels), (("await", 1), kernels),
        (("merge", 3, blocks, True), MAIN),
    ]  # fmt: skip
    # Rank 0's first half sees its own keys alone.
    assert [part.first for part in made.merged[0].parts] == [0, 16, 16]


@pytest.mark.parametrize("view", ["pipelined", "sequential", "compute_only"])
def test_other_parts_have_a_stream_of_their_own(
    fabric: Any, monkeypatch: pytest.MonkeyPatch, view: View
) -> None:
    seen: dict[bool, set[int]] = {True: set(), False: set()}

    def noted(q: Any, k: Any, v: Any, first: int, causal: bool, scale: float) -> Seen:
        seen[causal].add(CURRENT.stream)
        return attended(q, k, v, first, causal, scale)

    made = fabric(3)
    monkeypatch.setattr(attention, "attend", noted)
    run(made, planned(3, causal=True, sequence=96), view=view, calls=1)
    assert seen == {True: {MAIN}, False: {MAIN if view == "sequential" else KERNELS}}


def test_calls_of_our_own_kernel_at_a_time_have_counters_of_their_own(
    fabric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[bool, set[int]] = {True: set(), False: set()}

    def noted(*given: Any) -> Seen:
        *rest, counters = given
        seen[given[4]].add(min(counters - place for place in made.places if counters >= place))
        return attended(*rest)

    made = fabric(3)
    there = SimpleNamespace(COUNTERS_OFFSET=64, COUNTERS_BYTES=8)
    monkeypatch.setattr(attention_core, "native", lambda: there)
    monkeypatch.setattr(attention_core, "attend", noted)
    plan = planned(3, causal=True, sequence=96, head_dim=128)
    how = plan.part(AttentionSchedule).model_copy(update={"library": "mkernel"})
    assert run(made, plan.model_copy(update={"schedule": how}), calls=1) == []
    assert seen == {True: {64}, False: {72}}


def test_compute_only_exchanges_nothing(fabric: Any) -> None:
    made = fabric(2)
    plan = planned(2)
    run(made, plan, view="compute_only", calls=1)
    blocks = plan.part(AttentionSchedule).merge_blocks
    merge = (("merge", 2, blocks, False), MAIN)
    assert made.queued == [merge] * 2, "of both ranks: each is alone"


def test_a_wrong_part_is_seen(fabric: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own eyes: equal weights, and a mask that is off by one at a seam."""
    plan = planned(2, causal=True)

    def unweighted(*given: Any) -> Seen:
        found = attended(*given)
        return found._replace(lse=torch.zeros_like(found.lse))

    made = fabric(2)
    monkeypatch.setattr(attention, "attend", unweighted)
    assert run(made, plan)

    def shifted(q: Any, k: Any, v: Any, first: int, causal: bool, scale: float) -> Seen:
        return attended(q, k if causal else k[:, :, 1:], v if causal else v[:, :, 1:], first, causal,
                        scale)  # fmt: skip

    monkeypatch.setattr(attention, "attend", shifted)
    assert run(made, plan)


# ---- plans ---------------------------------------------------------------------------------------


def test_refused_sizes_name_the_nearest() -> None:
    with pytest.raises(ShapeError, match=r"sequence = 96 .*multiple of 64.* nearest: 64 or 128"):
        planned(2, causal=True, sequence=96)
    with pytest.raises(ShapeError, match=r"sequence = 40 .*multiple of 32.* nearest: 32 or 64"):
        planned(2, sequence=40)
    with pytest.raises(ShapeError, match=r"head_dim = 96 is not legal; expected one of 64, 128"):
        planned(2, head_dim=96)


def test_what_it_does_not_take_is_left_to_a_companion() -> None:
    claims = HopperAccelerator().capabilities()

    def taken(**changes: Any) -> bool:
        dtype = changes.pop("dtype", "float16")
        return takes(claims, "ring_attention", sizes_of(2, **changes), 2, dtype)

    assert taken()
    assert taken(causal=True)
    assert taken(layout="positions")
    assert not taken(head_dim=96)
    assert not taken(sequence=40)
    assert not taken(causal=True, sequence=96)
    assert not taken(dtype="float32")
    heads = claims.model_copy(update={"attention_layouts": ("heads",)})
    assert not takes(heads, "ring_attention", sizes_of(2, layout="positions"), 2, "float16")
    assert takes(claims, "gemm_all_reduce", {"m": 1}, 2, "float16")
    assert not takes(claims, "gemm_all_reduce", {"m": 1}, 2, "float64")


FAR = {"far_rows": 128, "put_blocks": 3, "land_blocks": 2}


def between_nodes(plan: LaunchPlan, ranks: int) -> LaunchPlan:
    """The same plan on nodes of so many ranks."""
    nodes = plan.world_size // ranks
    assert plan.schedule is not None
    chunk = {"chunk_rows": FAR["far_rows"]} if hasattr(plan.schedule, "chunk_rows") else {}
    how = plan.schedule.model_copy(update={**FAR, **chunk})
    return plan.model_copy(update={"nodes": nodes, "ranks_per_node": ranks, "schedule": how})


@pytest.mark.parametrize("layout", ["heads", "positions"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("world", "ranks"), [(2, 1), (3, 1), (4, 2)])
def test_results_between_nodes(
    fabric: Any, world: int, ranks: int, causal: bool, layout: str
) -> None:
    plan = planned(world, causal=causal, layout=layout, sequence=64 * world)
    assert run(fabric(world), between_nodes(plan, ranks)) == []


def test_what_is_queued_between_nodes(fabric: Any) -> None:
    made = fabric(4)
    assert run(made, between_nodes(planned(4), 2), calls=1) == []
    queued = [one for one in made.queued if one[0][0] != "merge"]
    # The neighbour comes first. Rank 0's keys have two heads of two batches, each of one chunk.
    crossing = [(("cross", 128, 3, 2), BESIDE), ("await crossing", MAIN)]
    assert queued == crossing + [(("await", each, 4, 1, 1), KERNELS) for each in (1, 3, 2)]


@pytest.mark.parametrize(("calls", "capturing", "loads"), [(3, False, 2), (2, True, 0)])
def test_kernels_are_loaded_before_one_waits_for_a_nic(
    fabric: Any, monkeypatch: pytest.MonkeyPatch, calls: int, capturing: bool, loads: int
) -> None:
    made = fabric(2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert run(made, between_nodes(planned(2), 1), calls=calls) == []
    merges = [
        what[3] for what, _ in made.queued if what[0] == "merge"
    ]  # those of both ranks' loads
    assert (merges.count(False), merges.count(True)) == (loads, calls)
    assert not loads or made.queued[0][0][0] == "merge"


def test_areas_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkernel.backends.accelerators.cuda._kernels")
    plan = between_nodes(planned(2), 1)
    keys = attention_ring.ring_keys(plan)
    data = native.native().DATA_OFFSET
    direct = AttentionExecutor.workspace(plan)
    assert direct.areas == (data + keys.area_bytes(2),)
    assert direct.staging == 0
    monkeypatch.setattr(type(plan.routes), "staged", True)
    staged = AttentionExecutor.workspace(plan)
    assert staged.areas == (keys.workspace_bytes(2),)
    assert staged.staging == keys.area_bytes(2)


def test_what_runs_on_one_node_says_so() -> None:
    claims = HopperAccelerator().capabilities()
    wanted = claims.model_copy(update={"ops": capabilities.ATTENTION})
    assert of_op("ring_attention", "hopper", wanted, 2) == ()
    told = ("accelerator 'hopper' runs ring_attention_backward on one node, not on 2",)
    assert of_op("ring_attention_backward", "hopper", wanted, 2) == told
    assert executor_of(planned(2)) is AttentionExecutor
    with pytest.raises(Unsupported, match=r"plan\.path is 'library'"):
        executor_of(planned(2).model_copy(update={"path": "library"}))


# Microseconds on two H200, D 128: cuDNN alone on parts that are there already.
ALONE = {
    (16, 16, False): {8192: 476, 16384: 1662, 24576: 3649, 49152: 15737, 98304: 64727},
    (16, 16, True): {8192: 369, 16384: 1003, 24576: 2036, 49152: 7571, 98304: 32904},
    (32, 8, False): {8192: 875, 16384: 3264, 24576: 7305, 49152: 31576, 98304: 129529},
    (32, 8, True): {8192: 683, 16384: 1994, 24576: 4167, 49152: 15501, 98304: 66553},
}


@pytest.mark.parametrize(("heads", "kv_heads", "causal"), list(ALONE))
def test_predicted_times_are_near_the_measured_ones(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, causal: bool
) -> None:
    monkeypatch.setattr(attention_tuning, "core_takes", lambda shape: False)
    for sequence, alone in ALONE[heads, kv_heads, causal].items():
        made = planned(
            2, batch=1, heads=heads, kv_heads=kv_heads, sequence=sequence, head_dim=128,
            causal=causal,
        ).prediction  # fmt: skip
        assert made is not None
        assert made.compute_us == pytest.approx(alone, rel=0.12)
        assert 0 < made.comm_us < made.compute_us
        assert made.compute_us < made.pipelined_us < made.sequential_us
        constants = machine().constants
        assert made.pipelined_us - made.compute_us == pytest.approx(constants.launch_us)


class Started:
    """Stands for the native module: notes what is made of it and started."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self.told: list[Any] = []

    def attend(self, q: Any, k: Any, v: Any, first: int, causal: bool, scale: float) -> Seen:
        """Stand for the library's attention."""
        self.told.append((tuple(q.shape), tuple(k.shape), k.stride(), first, causal))
        out = torch.zeros_like(q[:, :, first:])
        return Seen(out, torch.zeros(out.shape[:3]), first)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._made, name)

        def note(*given: Any, **named: Any) -> Any:
            small = [one for one in given if isinstance(one, int) and one < 1 << 20]
            self.told.append((name, *small, str(named)))
            return found(*given, **named) if name in made else None

        made = (
            "Keys", "Merge", "Part", "Piece", "Running", "Given", "Sum", "Sums", "Core", "Ring",
            "RingPart", "KeysCrossing",
        )  # fmt: skip
        starts = (
            "push_keys", "attend_ring", "push_piece", "tell", "await_part", "merge_parts",
            "push_gradients", "sum_gradients", "cross_keys", "await_crossing",
        )  # fmt: skip
        return note if name in (*made, *starts) else found


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: values may be illegal
def test_no_field_is_decoration(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(made)
    for module in (attention, attention_merge, attention_ring):
        monkeypatch.setattr(module, "native", lambda: started)
    monkeypatch.setattr(attention_ring, "bytes_at", lambda at, n: torch.zeros(n, dtype=torch.uint8))

    monkeypatch.setattr(attention, "attend", started.attend)
    monkeypatch.setattr(attention, "on_stream", on_stream)
    world = gpus()
    usual = world.plan("ring_attention", sizes_of(2, causal=True), dtype="bfloat16")
    q, k = torch.zeros(2, 4, 32, 64).bfloat16(), torch.zeros(2, 2, 32, 64).bfloat16()
    tensors = {"q": q, "k": k, "v": k.clone(), "out": q.clone(), "lse": torch.zeros(2, 4, 32)}
    assert decorations_of(world, usual, tensors, started) == []


def test_layouts_that_a_plan_is_not_of_are_refused() -> None:
    pytest.importorskip("mkernel.backends.accelerators.cuda._kernels")
    world = gpus()
    q = torch.zeros(2, 4, 32, 64).bfloat16()
    turned = lying(q, "positions")
    for layout, right, wrong in (("heads", q, turned), ("positions", turned, q)):
        plan = world.plan("ring_attention", sizes_of(2, layout=layout), dtype="bfloat16")
        world.admit(plan, {"q": right})
        with pytest.raises(LayoutError):
            world.admit(plan, {"q": wrong})


@pytest.mark.parametrize(
    ("sizes", "library"),
    [
        ({}, "mkernel"),
        ({"causal": True, "kv_heads": 4}, "mkernel"),
        ({"sequence": 2 * 8192 - 32}, "cudnn"),
        ({"head_dim": 64}, "cudnn"),
    ],
)
def test_our_own_kernel_computes_long_parts_of_heads_of_128(sizes: Sizes, library: str) -> None:
    long = {"batch": 1, "head_dim": 128, "sequence": 2 * 8192, **sizes}
    assert planned(2, **long).part(AttentionSchedule).library == library
