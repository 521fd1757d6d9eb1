"""Ring attention by one kernel: what it is told to see, its part on the host with the stand-ins of
test_hopper_attention.py, and which plans have it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from gpu_plans import gpu_plan
from hopper_calls import gpus
from test_hopper_attention import (
    BESIDE,
    MAIN,
    Fabric,
    Here,
    Order,
    Started,
    between_nodes,
    decorations_of,
    flat_at,
    planned,
    rows_at,
    run,
    sizes_of,
)

from mkernel import Invariant
from mkernel.backends.accelerators.cuda import device_world
from mkernel.backends.accelerators.cuda.attention import ring as attention_ring
from mkernel.backends.accelerators.cuda.attention.ring import AttentionRing
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.schedule import AttentionInPiecesSchedule, AttentionSchedule
from mkernel.backends.accelerators.hopper.attention import core as attention_core
from mkernel.backends.accelerators.hopper.attention import kernel as attention_kernel
from mkernel.backends.accelerators.hopper.attention import tuning as attention_tuning
from mkernel.backends.accelerators.hopper.attention.kernel import AttentionKernelExecutor
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.gemm.tuning import FLAGS
from mkernel.backends.accelerators.hopper.schedule import AttentionKernelSchedule
from mkernel.backends.contracts.instrumented import View
from mkernel.backends.contracts.memory import PeerMemory
from mkernel.errors import ArgumentError
from mkernel.ops.zigzag import zigzag_positions
from mkernel.plan.arguments import Around
from mkernel.plan.model import LaunchPlan
from mkernel.plan.request import Scheduled, ScheduleRequest


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_HOPPER_ATTENTION", "kernel")


class RingPart(NamedTuple):
    source: int
    first: int
    keys: int


class Core(NamedTuple):
    tensors: list[tuple[int, tuple[int, ...]]]
    lse: int
    counters: int
    shape: tuple[int, int, int, int, int]
    scale: float
    causal: bool
    half: bool


class Ring(NamedTuple):
    core: Core
    parts: list[RingPart]
    slots: tuple[int, tuple[int, ...]]
    values: int
    chunk_rows: int
    blocks: int
    exchanges: bool
    by_head: bool
    ordered: bool


class KernelFabric(Fabric):
    """Also of the kernel, which does as kernels/attention/ring_attention.hpp says. ``rings``: what
    each rank's was given."""

    Core, Ring, RingPart = Core, Ring, RingPart
    MAX_FLAGS, COUNTERS_OFFSET, COUNTERS_BYTES = FLAGS, 64, 8

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.shares = False
        self.rings: dict[int, Ring] = {}

    def shares_device(self, device: int, here: Here) -> bool:
        return self.shares

    def attend_ring(self, device: int, here: Here, ring: Ring, stream: int) -> None:
        self._note(here, ("attend", ring.blocks, ring.exchanges), stream)
        self.rings[here.rank] = ring
        core = ring.core
        batch, heads, kv_heads, queries, keys, width = core.shape
        assert core.scale > 0
        assert core.counters == here.workspaces[here.rank] + self.COUNTERS_OFFSET
        dtype = torch.float16 if core.half else torch.bfloat16

        def keys_at(at: tuple[int, tuple[int, ...]], count: int) -> torch.Tensor:
            return rows_at(*at, dtype, batch, kv_heads, count, width).double()

        q, out = (
            rows_at(*core.tensors[which], dtype, batch, heads, queries, width) for which in (0, 3)
        )
        k, v = ([keys_at(core.tensors[which], keys)] for which in (1, 2))
        hidden = [torch.ones(queries, keys, dtype=torch.bool).triu(1) & core.causal]
        for number, part in enumerate(ring.parts):
            if ring.exchanges:
                assert self.flags[here.rank, part.source].wait(60)
            for which, found in enumerate((k, v)):
                at = ring.slots[0] + (2 * number + which) * ring.values * 2
                found.append(keys_at((at, ring.slots[1]), part.keys))
            late = torch.arange(queries) < part.first
            hidden.append(late[:, None].expand(queries, part.keys))
        groups = heads // kv_heads
        every, values = (torch.cat(each, 2).repeat_interleave(groups, 1) for each in (k, v))
        scores = q.double() @ every.transpose(2, 3) * core.scale
        scores = scores.masked_fill(torch.cat(hidden, 1), float("-inf"))
        out.copy_(scores.softmax(3) @ values)
        lse = rows_at(
            core.lse, (heads * queries, queries, 1), torch.float32, batch, heads, queries, 1
        )
        lse[..., 0].copy_(scores.logsumexp(3))


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the fabric of a world."""

    def make(world: int) -> KernelFabric:
        made = KernelFabric(world)
        for module in (attention_core, attention_kernel, attention_ring, device_world):
            monkeypatch.setattr(module, "native", lambda: made)
        monkeypatch.setattr(attention_ring, "bytes_at", flat_at)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        return made

    return make


def kernel(world: int, rows: int = 256, **changes: Any) -> LaunchPlan:
    """A plan of the kernel, of so many rows a rank."""
    plan = planned(world, **{"sequence": rows * world, "head_dim": 128, **changes})
    assert isinstance(plan.schedule, AttentionKernelSchedule)
    return plan


# ---- what a kernel is told to see ----------------------------------------------------------------


def seen(plan: LaunchPlan, rank: int) -> torch.Tensor:
    """How often each query of a rank sees each key of the sequence, by the kernel's rules: own ones in
    order, of each part what all queries from ``first`` on see."""
    shape: Any = plan.shape
    world, rows = plan.world_size, shape.sequence // plan.world_size
    workspaces = {peer: PeerMemory(0, 0) for peer in range(world) if peer != rank}
    call: Any = SimpleNamespace(plan=plan, rank=rank, workspace=0, peers=workspaces)
    held = [
        zigzag_positions(shape.sequence, world, each) if shape.causal
        else torch.arange(each * rows, (each + 1) * rows)
        for each in range(world)
    ]  # fmt: skip
    found = torch.zeros(rows, shape.sequence, dtype=torch.int32)
    own = torch.ones(rows, rows, dtype=torch.int32)
    found[:, held[rank]] = own.tril() if shape.causal else own
    context: Any = DispatchContext(0, Order(), 64)  # type: ignore[arg-type]
    for source in AttentionRing(call, context).sources:
        keys = source.k.shape[2]
        assert source.first % 128 == keys % 128 == 0
        found[source.first :, held[source.rank][:keys]] += 1
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world", range(2, 9))
def test_every_query_sees_each_of_its_keys_once(
    monkeypatch: pytest.MonkeyPatch, world: int, causal: bool
) -> None:
    monkeypatch.setattr(attention_ring, "native", lambda: KernelFabric(world))
    nothing = torch.zeros(1 << 22, dtype=torch.uint8)
    monkeypatch.setattr(attention_ring, "bytes_at", lambda at, nbytes: nothing[:nbytes])
    plan = kernel(world, batch=1, heads=1, kv_heads=1, causal=causal)
    shape: Any = plan.shape
    for rank in range(world):
        wanted = torch.ones(256, shape.sequence, dtype=torch.int32)
        if causal:
            mine = zigzag_positions(shape.sequence, world, rank)
            wanted = (mine[:, None] >= torch.arange(shape.sequence)).int()
        assert torch.equal(seen(plan, rank), wanted)


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["heads", "positions"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("world", "width"), [(2, 128), (3, 64), (4, 128)])
def test_results(fabric: Any, world: int, width: int, causal: bool, layout: str) -> None:
    plan = kernel(world, causal=causal, layout=layout, head_dim=width)
    assert run(fabric(world), plan) == []


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_any_scale(fabric: Any, scale: float) -> None:
    assert run(fabric(2), kernel(2, causal=True), scale=scale) == []


@pytest.mark.parametrize(
    ("view", "shares", "stream"),
    [("pipelined", False, BESIDE), ("pipelined", True, MAIN), ("sequential", False, MAIN)],
)
def test_what_is_queued(fabric: Any, view: View, shares: bool, stream: int) -> None:
    """Within a device copies come first: they would find no multiprocessor beside the kernel."""
    made, plan = fabric(3), kernel(3, causal=True)
    made.shares = shares
    assert run(made, plan, view=view, calls=1) == []
    blocks = plan.part(AttentionKernelSchedule).blocks
    assert made.queued == [("push", stream), (("attend", blocks, True), MAIN)]
    parts = [[*made.rings[rank].parts] for rank in range(3)]
    assert parts == [
        [(2, 128, 256), (1, 128, 256)], [(0, 0, 128), (2, 128, 256)], [(1, 0, 128), (0, 0, 128)],
    ]  # fmt: skip


def test_compute_only_exchanges_nothing(fabric: Any) -> None:
    made, plan = fabric(2), kernel(2)
    run(made, plan, view="compute_only", calls=1)
    assert made.queued == [(("attend", plan.part(AttentionKernelSchedule).blocks, False), MAIN)]


@pytest.mark.parametrize("world", [1, 2])
def test_invariant_results_take_keys_by_position(fabric: Any, world: int) -> None:
    plan = kernel(2, causal=True, sequence=512)
    if world == 1:  # which has any rows and no peers
        sizes = sizes_of(1, causal=True, sequence=320)
        plan = gpu_plan(
            HopperAccelerator(), "ring_attention", 1, sizes, dtype="float16",
            around=Around(invariant=Invariant()),
        )  # fmt: skip
    made = fabric(world)
    assert run(made, plan.model_copy(update={"invariant": Invariant()})) == []
    assert all(ring.ordered for ring in made.rings.values())
    assert {ring.exchanges for ring in made.rings.values()} == {world > 1}


@pytest.mark.parametrize("fault", ["seam", "skipped", "order"])
def test_a_wrong_part_is_seen(fabric: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The test's own eyes."""
    made, right = fabric(2), Ring

    def wrong(core: Core, parts: list[RingPart], *rest: Any) -> Ring:
        if fault == "seam":
            parts = [each._replace(keys=each.keys - 1) for each in parts]
        if fault == "order":
            parts = [each._replace(first=128 - each.first) for each in parts]
        return right(core, [] if fault == "skipped" else parts, *rest)

    monkeypatch.setattr(made, "Ring", wrong)
    assert run(made, kernel(2, causal=True))


def test_chunks_are_bytes_of_a_stretch(fabric: Any) -> None:
    made, few = fabric(2), {"batch": 1, "rows": 384}
    how = AttentionKernelSchedule(chunk_rows=256, blocks=4)
    assert run(made, kernel(2, **few).model_copy(update={"schedule": how}), calls=1) == []
    assert made.chunk == 256 * 128 * 2
    assert run(made, kernel(2, layout="positions", **few), calls=1) == []
    assert made.chunk == 384 * 2 * 128 * 2, "no more than there is"


# ---- plans ---------------------------------------------------------------------------------------

LONG: dict[str, Any] = {
    "batch": 1,
    "heads": 16,
    "kv_heads": 16,
    "head_dim": 128,
    "sequence": 1 << 14,
}
CHOSEN: dict[str, Any] = {**LONG, "sequence": 1 << 13}
"""Where the kernel is predicted, and was found, to be faster."""


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 256}, {"sequence": 2 * 8192 - 32}, {"causal": True, "sequence": 2 * 128 * 63},
        {"sequence": 1 << 19}, {"world": 1}, {"documents": True},
    ],
)  # fmt: skip
def test_what_is_left_to_parts(changes: dict[str, Any]) -> None:
    world, sizes = changes.get("world", 2), {**LONG, **changes}
    sizes.pop("world", None)
    documents = sizes.pop("documents", False)
    assert isinstance(planned(2, **LONG).schedule, AttentionKernelSchedule)
    plan = planned(world, **sizes)
    if documents:
        shape = plan.shape.model_copy(update={"documents": True})
        plan = plan.model_copy(update={"shape": shape})
        assert not attention_tuning.kernel_takes(plan)
    else:
        assert isinstance(plan.schedule, AttentionSchedule | AttentionInPiecesSchedule)


@pytest.mark.parametrize("layout", ["heads", "positions"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("world", "ranks", "width"), [(2, 1, 128), (3, 1, 64), (4, 2, 128)])
def test_results_between_nodes(
    fabric: Any, world: int, ranks: int, width: int, causal: bool, layout: str
) -> None:
    plan = kernel(world, causal=causal, layout=layout, head_dim=width)
    assert run(fabric(world), between_nodes(plan, ranks)) == []


@pytest.mark.parametrize("view", ["pipelined", "sequential"])
def test_what_is_queued_between_nodes(fabric: Any, view: View) -> None:
    """The kernel starts when all blocks run that bring it other nodes' keys; it is loaded before."""
    made, plan = fabric(4), between_nodes(kernel(4, causal=True), 2)
    assert run(made, plan, view=view, calls=1) == []
    blocks = plan.part(AttentionKernelSchedule).blocks
    beside = view == "pipelined"
    assert made.queued == [
        (("attend", blocks, False), MAIN),
        (("cross", 128, 3, 2), BESIDE if beside else MAIN),
        *[("await crossing", MAIN)] * beside,
        (("attend", blocks, True), MAIN),
    ]
    assert [part.source for part in made.rings[2].parts] == [3, 1, 0]
    assert made.rings[0].by_head
    assert made.rings[0].chunk_rows == 128


@pytest.mark.parametrize(("wished", "kernel"), [("kernel", True), ("parts", False), ("auto", True)])
def test_who_asks_for_it(monkeypatch: pytest.MonkeyPatch, wished: str, kernel: bool) -> None:
    """By name, or by its predicted time."""
    monkeypatch.setenv("MKERNEL_HOPPER_ATTENTION", wished)
    plan = planned(2, **CHOSEN)
    assert isinstance(plan.schedule, AttentionKernelSchedule) == kernel


def test_a_plan_says_what_either_way_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_HOPPER_ATTENTION", "auto")
    noted: list[Scheduled] = []

    def schedule(request: ScheduleRequest) -> Scheduled:
        noted.append(attention_tuning.schedule(request))
        return noted[-1]

    monkeypatch.setattr(HopperAccelerator, "schedule", staticmethod(schedule))
    planned(2, **CHOSEN)
    parts, kernel = (each for each in noted[-1].alternatives if each.decision == "attention")
    assert (parts.option, parts.chosen, kernel.option, kernel.chosen) == (
        "parts", False, "kernel", True,
    )  # fmt: skip
    assert parts.predicted_us is not None
    assert kernel.predicted_us is not None
    assert 400 < kernel.predicted_us < parts.predicted_us < 550
    assert (parts.why, kernel.why) == ("", "")
    planned(4, **CHOSEN)
    assert "never judged" in noted[-1].alternatives[-1].why


@pytest.mark.parametrize("world", [2, 4, 8])
def test_auto_is_for_worlds_of_any_size(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    monkeypatch.setenv("MKERNEL_HOPPER_ATTENTION", "auto")
    plan = planned(world, **{**CHOSEN, "sequence": 4096 * world})
    assert isinstance(plan.schedule, AttentionKernelSchedule)


# Microseconds on two H100 at e928694, one call a turn (bench/hopper_notes.md): one kernel, parts.
MEASURED = {
    (16, 16, 8192, False): (456, 455), (16, 16, 8192, True): (265, 282),
    (32, 8, 8192, False): (827, 881), (32, 8, 8192, True): (424, 499),
    (16, 16, 16384, False): (1669, 1683), (16, 16, 16384, True): (878, 872),
    (16, 16, 24576, False): (3668, 3685), (16, 16, 24576, True): (1909, 1875),
}  # fmt: skip


@pytest.mark.parametrize(("heads", "kv_heads", "sequence", "causal"), list(MEASURED))
def test_the_way_that_is_chosen_was_the_faster_one_or_nearly(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, sequence: int, causal: bool
) -> None:
    monkeypatch.setenv("MKERNEL_HOPPER_ATTENTION", "auto")
    sizes = {**LONG, "heads": heads, "kv_heads": kv_heads, "sequence": sequence, "causal": causal}
    plan = planned(2, **sizes)
    times = MEASURED[heads, kv_heads, sequence, causal]
    kernel = isinstance(plan.schedule, AttentionKernelSchedule)
    assert times[not kernel] <= 1.01 * min(times)
    assert plan.prediction is not None
    if kernel:
        assert plan.prediction.pipelined_us == pytest.approx(times[0], rel=0.08)


def test_a_slow_kernel_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_HOPPER_ATTENTION", "auto")
    machine = attention_tuning._MACHINE
    slow = machine.attention.kernel.model_copy(update={"tflops": 300.0})
    how = machine.attention.model_copy(update={"kernel": slow})
    monkeypatch.setattr(attention_tuning, "_MACHINE", machine.model_copy(update={"attention": how}))
    plan = planned(2, **CHOSEN)
    assert isinstance(plan.schedule, AttentionSchedule)


def test_schedules_that_a_call_would_not_follow_are_refused() -> None:
    pytest.importorskip("mkernel.backends.accelerators.cuda._kernels")
    plan = kernel(2)
    parts = plan.model_copy(update={"shape": plan.shape.model_copy(update={"head_dim": 256})})
    with pytest.raises(ArgumentError, match=r"plan\.schedule\.kind"):
        AttentionKernelExecutor.workspace(parts)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: values may be illegal
def test_no_field_is_decoration(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: Any = Started(made)
    started.shares_device = lambda *_: False
    for module in (attention_core, attention_kernel, attention_ring):
        monkeypatch.setattr(module, "native", lambda: started)
    monkeypatch.setattr(attention_ring, "bytes_at", lambda at, n: torch.zeros(n, dtype=torch.uint8))
    world = gpus()
    sizes = sizes_of(2, causal=True, head_dim=128, sequence=512)
    usual = world.plan("ring_attention", sizes, dtype="bfloat16")
    q, k = torch.zeros(2, 4, 256, 128).bfloat16(), torch.zeros(2, 2, 256, 128).bfloat16()
    tensors = {"q": q, "k": k, "v": k.clone(), "out": q.clone(), "lse": torch.zeros(2, 4, 256)}
    assert decorations_of(world, usual, tensors, started) == []
