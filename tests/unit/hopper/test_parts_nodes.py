"""The GEMM ops of ``cuda`` between nodes on the host: plans, areas, and calls of ranks that are
threads, with stand-ins for the native module (``nodes_fabric``) and for torch's products."""

from __future__ import annotations

from typing import Any

import devices
import pytest
import torch
from nodes_fabric import NodesFabric, Slots
from parts_fabric import BESIDE, MAIN, Order
from parts_runs import call_of, case, fabrics, run
from plan_walk import WalkedWorld

from mkernel.backends.accelerators.cuda import native_kernels
from mkernel.backends.accelerators.cuda.backend import CudaAccelerator
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.dispatch import executor_of
from mkernel.backends.accelerators.cuda.gemm import gather_parts, library_tuning, reduce_parts
from mkernel.backends.accelerators.cuda.gemm.gather_parts import GatherPartsExecutor
from mkernel.backends.accelerators.cuda.gemm.library import LibraryExecutor
from mkernel.backends.accelerators.cuda.gemm.parts_exchange import Running
from mkernel.backends.accelerators.cuda.gemm.reduce_parts import ReducePartsExecutor
from mkernel.backends.accelerators.cuda.schedule import (
    LibrarySchedule,
    PartsSchedule,
    ProductSchedule,
)
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.errors import ArgumentError, Unsupported
from mkernel.plan import planner
from mkernel.plan.arguments import Around, Norm
from mkernel.plan.missing import of_op
from mkernel.plan.model import LaunchPlan, Scales

OPS = CudaAccelerator().capabilities().library_ops
every_op = pytest.mark.parametrize("op", OPS)
WORLDS = ((2, 1), (3, 1), (2, 2), (3, 2))
SMALL = {"m": 48, "n": 32, "k": 64}
LARGE = {"m": 8192, "n": 4096, "k": 4096}


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the fabric of a world."""
    monkeypatch.setattr(DispatchContext, "network_of", lambda self, call: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fabrics(monkeypatch, NodesFabric)


def world_of(
    nodes: int, ranks: int, *, direct: bool = False, accelerator: Any = None
) -> WalkedWorld:
    gpus = tuple(devices.gpu(index, name="NVIDIA H200") for index in range(ranks))
    nics = (devices.nic(0, gpudirect=direct),)
    topology = devices.world(*(devices.node(gpus, nics) for _ in range(nodes)))
    return WalkedWorld(accelerator or CudaAccelerator(), topology, ranks)


def planned(
    op: str, world: tuple[int, int], sizes: dict[str, int] | None = None, *, direct: bool = False,
    **options: Any,
) -> LaunchPlan:  # fmt: skip
    given = {"dtype": "bfloat16", **options}
    return world_of(*world, direct=direct).plan(op, sizes or SMALL, **given)


def scaled(mode: Any) -> dict[str, Any]:
    """Options of e4m3 operands."""
    around = Around(scales=Scales(mode=mode, use_fast_accum=False))
    return {"dtype": "float8_e4m3fn", "b_layout": "column", "around": around}


# ---- plans ---------------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize("direct", [False, True])
def test_each_rank_is_one_part_between_nodes(op: str, direct: bool) -> None:
    made = planned(op, (2, 2), LARGE, direct=direct)
    assert (made.accelerator, made.path, made.nic, made.verbs) == ("cuda", "library", "cx7", "soft")
    assert made.part(PartsSchedule).chunks == 1
    assert made.routes.staged == (not direct)
    assert {one.kind for one in made.routes.classes} == {"p2p", "nic"}
    parts = GatherPartsExecutor if op == OPS[0] else ReducePartsExecutor
    assert CudaAccelerator.executor_of(made) is parts
    assert made.prediction is not None
    assert made.prediction.fused_us is None


@every_op
@pytest.mark.parametrize("mode", [None, "row"])
def test_times_are_those_of_nics(op: str, mode: Any) -> None:
    """Four ranks exchange by NVLink, or two by two by a NIC of 400 Gb/s for both."""
    options = {} if mode is None else scaled(mode)
    near, far = (planned(op, each, LARGE, **options).prediction for each in ((1, 4), (2, 2)))
    assert near is not None
    assert far is not None
    assert far.comm_us > 3 * near.comm_us
    assert far.pipelined_us > far.comm_us


@every_op
def test_what_hopper_does_between_nodes_stays_its_own(op: str) -> None:
    made = world_of(2, 2, accelerator=HopperAccelerator()).plan(op, LARGE, dtype="bfloat16")
    assert made.path == "fused"
    with pytest.raises(
        Unsupported, match=f"'hopper' has no library path for '{op}' in a world of 2"
    ):
        world_of(2, 2, accelerator=HopperAccelerator()).plan(
            op, LARGE, dtype="bfloat16", path="library"
        )


def test_what_runs_on_one_node_is_named() -> None:
    claims = CudaAccelerator().capabilities()
    assert claims.one_node_ops == ("all_reduce", "ring_attention_backward")
    assert HopperAccelerator().capabilities().one_node_ops == claims.one_node_ops
    assert [of_op(op, "cuda", claims, 2) for op in OPS] == [()] * 3
    with pytest.raises(Unsupported, match="'cuda' runs all_reduce on one node, not on 2"):
        planned("all_reduce", (2, 2), {"m": 64, "n": 4096})


@every_op
def test_other_ways_are_refused(op: str) -> None:
    with pytest.raises(Unsupported, match=f"'cuda' has no kernel that does all of '{op}'; set"):
        planned(op, (2, 2), path="fused")
    with pytest.raises(
        Unsupported, match=f"'cuda' does not run the exchange 'hierarchical' of '{op}'"
    ):
        planned(op, (2, 2), exchange="hierarchical")


@every_op
def test_schedules_that_calls_would_not_follow_are_refused(fabric: Any, op: str) -> None:
    fabric(2, 2)
    made = planned(op, (2, 2))
    more = made.part(PartsSchedule).model_copy(update={"chunks": 2})
    with pytest.raises(ArgumentError, match=r"plan\.schedule\.chunks = 2.*one part between nodes"):
        executor_of(made).workspace(made.model_copy(update={"schedule": more}))
    whole = LibrarySchedule(product="bfloat16", way="two_shot" if op == OPS[2] else None)
    changed = made.model_copy(update={"schedule": whole})
    assert executor_of(changed) is LibraryExecutor
    with pytest.raises(Unsupported, match=f"'cuda' runs {op} on one node; this plan has 2"):
        LibraryExecutor.workspace(changed)


# ---- memory --------------------------------------------------------------------------------------


@every_op
def test_areas(op: str) -> None:
    """NICs write where ranks of a node write; the outbox is behind it."""
    made = native_kernels.native()
    direct, staged = (planned(op, (2, 2), LARGE, direct=each) for each in (True, False))
    own = LARGE["m"] // 4
    outbox = 0
    if op == OPS[0]:
        area = LARGE["m"] * LARGE["k"] * 2
    else:
        area = outbox = 4 * own * LARGE["n"] * 2
        area += LARGE["m"] * LARGE["n"] * 2 if op == OPS[2] else 0
    found = CudaAccelerator().workspace(direct)
    assert (found.areas, found.staging) == ((made.DATA_OFFSET + area + outbox,), 0)
    assert found.signals == made.NETWORK_WORDS
    found = CudaAccelerator().workspace(staged)
    assert (found.areas, found.staging) == ((made.DATA_OFFSET + area,), area + outbox)


# ---- calls ---------------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("view", ["pipelined", "sequential"])
@pytest.mark.parametrize("world", WORLDS)
def test_results(fabric: Any, op: str, world: tuple[int, int], staged: bool, view: Any) -> None:
    made = planned(op, world, direct=not staged)
    run(made, fabric(*world, staged), view=view, symmetric=True, calls=3)


@every_op
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_of_other_operands(
    fabric: Any, op: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bias, column-major; results that are rounded once, and late ranks."""
    around = Around(bias=True)
    run(planned(op, (2, 2), dtype=dtype, b_layout="column", around=around), fabric(2, 2), late=3)
    monkeypatch.setattr(library_tuning, "product_dtype", lambda plan: plan.dtype)
    planner._planned.cache_clear()
    made = planned(op, (2, 1), {"m": 256, "n": 264, "k": 64}, dtype=dtype, around=around)
    planner._planned.cache_clear()
    assert made.part(ProductSchedule).product == dtype
    run(made, fabric(2, 1), late=1)


@every_op
@pytest.mark.parametrize("mode", ["tensor", "row", "block"])
def test_results_of_e4m3_operands(fabric: Any, op: str, mode: Any) -> None:
    """Scales travel with the rows that they are of."""
    made = planned(op, (2, 2), {"m": 48, "n": 128, "k": 256}, **scaled(mode))
    assert made.scales is not None
    run(made, fabric(2, 2), gathered=op == OPS[0])


@pytest.mark.parametrize("m", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("world", [(2, 2), (3, 1)])
def test_rows_of_a_sum_that_do_not_divide(fabric: Any, m: int, world: tuple[int, int]) -> None:
    run(planned(OPS[2], world, {**SMALL, "m": m}), fabric(*world))


def test_nothing_is_sent_from_behind_an_output(
    fabric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot has as many rows for a rank that owns fewer."""
    made, ends, sent = fabric(3, 1), set[int](), list[tuple[int, int]]()
    start, send_far = ReducePartsExecutor.start, made.send_far

    def started(self: Any, call: Any, stream: int) -> None:
        out = call.tensors["out"]
        ends.add(out.data_ptr() + out.nbytes)
        start(self, call, stream)

    def sending(device: int, here: Any, from_: int, slots: Slots, stream: int) -> None:
        sent.append((from_, from_ + slots.bytes))
        send_far(device, here, from_, slots, stream)

    monkeypatch.setattr(ReducePartsExecutor, "start", started)
    monkeypatch.setattr(made, "send_far", sending)
    run(planned(OPS[2], (3, 1), {**SMALL, "m": 5}), made, calls=1)
    assert (len(ends), len(sent)) == (3, 3)
    assert not [end for end in ends for first, last in sent if first <= end < last]


def test_gathered_rows_are_an_output_too(fabric: Any) -> None:
    made = planned(OPS[0], (2, 2))
    for tensors in run(made, fabric(2, 2), gathered=True):
        whole = torch.cat([case(made).inputs(rank, 4, 2)["a"] for rank in range(4)])
        assert torch.equal(tensors["gathered"], whole)


def test_rows_are_normalised_when_all_are_there(
    fabric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fabric(2, 1)
    monkeypatch.setattr(
        reduce_parts, "normalise", lambda call, stream: made.told[call.rank].append("norm")
    )
    run(planned(OPS[2], (2, 1), around=Around(norm=Norm(False, 1e-6))), made, calls=1)
    assert made.told[0][-2:] == ["end", "norm"]


@every_op
def test_alone_nothing_is_sent(fabric: Any, op: str) -> None:
    made = fabric(2, 2)
    run(planned(op, (2, 2)), made, view="compute_only")
    assert made.told == [[]] * 4


# ---- what is queued, and in which order ----------------------------------------------------------


def test_rows_leave_the_node_first_and_this_nodes_are_multiplied_first(fabric: Any) -> None:
    made = fabric(2, 2)
    run(planned(OPS[0], (2, 2)), made, calls=1)
    rows = Slots(0, 12 * 64 * 2, 0)
    assert made.told[0] == [
        "fork", ("send_far", rows, BESIDE), ("push", 1, rows.bytes, 0, BESIDE),
        ("land", [rows], BESIDE),
        ("await", 1, 1), ("await", 2, 2), ("await", 3, 3), "join", "end",
    ]  # fmt: skip
    assert [each[1] for each in made.told[3] if each[0] == "await"] == [2, 0, 1]


def test_scales_land_before_their_rows(fabric: Any) -> None:
    made = fabric(2, 1)
    run(planned(OPS[0], (2, 1), {"m": 48, "n": 128, "k": 256}, **scaled("row")), made, calls=1)
    rows, scales = Slots(0, 24 * 256, 0), Slots(48 * 256, 24 * 4, 2)
    assert made.told[0][1:4] == [
        ("send_far", scales, BESIDE), ("send_far", rows, BESIDE), ("land", [scales, rows], BESIDE),
    ]  # fmt: skip


def test_partial_results_for_other_nodes_leave_before_those_for_this_one(fabric: Any) -> None:
    made, slot = fabric(2, 2), 12 * 32 * 4
    run(planned(OPS[1], (2, 2)), made, calls=1)
    outbox, partials = 4 * slot, Slots(0, slot, 0)
    assert made.told[0] == [
        "fork", ("fill", slot, outbox + 2 * slot, BESIDE),
        "fork", ("fill", slot, outbox + 3 * slot, BESIDE),
        ("send_outbox", outbox, partials, BESIDE),
        "fork", ("push", 1, slot, 0, BESIDE), ("land", [partials], BESIDE),
        ("await", 3, 3), ("await", 2, 2), ("await", 1, 1), "join", ("sum", 12 * 32, 264, True),
    ]  # fmt: skip


def test_sums_travel_as_rows_do(fabric: Any) -> None:
    """No rank writes to the output of another one."""
    made, slot = fabric(2, 2), 12 * 32 * 4
    run(planned(OPS[2], (2, 2)), made, calls=1, symmetric=True)
    sums = Slots(4 * slot, slot // 2, 4)
    told = made.told[0]
    start = told.index(("sum", 12 * 32, 264, False)) + 1
    assert told[start:] == [
        "fork", ("push", 1, slot // 2, 4, BESIDE), "fork", ("send_far", sums, BESIDE),
        ("land", [sums], BESIDE),
        ("await", 1, 5), ("await", 3, 7), ("await", 2, 6), "join", "end",
    ]  # fmt: skip


@every_op
def test_one_after_another_all_is_on_the_calls_stream(fabric: Any, op: str) -> None:
    made = fabric(2, 2)
    run(planned(op, (2, 2)), made, view="sequential", calls=1)
    sends = ("push", "fill", "send_far", "send_outbox", "land")
    assert {each[-1] for each in made.told[0] if each[0] in sends} == {MAIN}
    assert not {"fork", "join"} & {*filter(lambda each: isinstance(each, str), made.told[0])}


@every_op
def test_kernels_are_loaded_before_one_waits_for_a_nic(
    fabric: Any, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours, and the library's by products that wait for nothing; in a capture nothing is added."""
    made = fabric(2, 1)
    told: list[Any] = []
    for module in (gather_parts, reduce_parts):
        multiply_of = module.multiply_of

        def counted(call: Any, *how: Any, of: Any = multiply_of) -> Any:
            told.append((call.rank, call.number, call.view))
            return of(call, *how)

        monkeypatch.setattr(module, "multiply_of", counted)
    run(planned(op, (2, 1)), made, calls=2)
    assert made.loaded == [0, 0]
    assert [each[1:] for each in told if each[0] == 0] == [
        (1, "compute_only"), (1, "pipelined"), (2, "pipelined")
    ]  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    told.clear()
    run(planned(op, (2, 1)), fabric(2, 1), calls=1)
    assert {each[2] for each in told} == {"pipelined"}


@every_op
def test_native_code_starts_no_call_between_nodes(fabric: Any, op: str) -> None:
    made = planned(op, (2, 1), LARGE)
    context: Any = DispatchContext(0, Order([]), 64)  # type: ignore[arg-type]
    executor: Any = executor_of(made)(call_of(made, fabric(2, 1), 0, {}), context)
    assert executor.starter({}, {"a": (4096, 1), "b": (4096, 1)}) is None


# ---- faults that the checks here must catch ------------------------------------------------------


@every_op
@pytest.mark.parametrize("fault", ["land", "send"])
def test_what_does_not_cross_is_noticed(
    fabric: Any, op: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fabric(2, 1)
    if fault == "send":  # the words count, and the bytes are not there
        monkeypatch.setattr(
            made, "_put", lambda here, at, step, slots: NodesFabric._put(
                made, here, at, step, Slots(slots.offset + 4096, slots.bytes, slots.flag)
            )
        )  # fmt: skip
    else:
        land = Running.land
        monkeypatch.setattr(Running, "land", lambda self, slots: land(
            self, [Slots(each.offset + 256, each.bytes, each.flag) for each in slots]
        ))  # fmt: skip
    with pytest.raises(AssertionError, match="rank"):
        run(planned(op, (2, 1)), made, calls=1)
