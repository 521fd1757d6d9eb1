"""The GEMM ops of e4m3 operands on the host: ranks are threads, and the native module and torch's
products stand-ins (``parts_fabric``)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gpu_plans import gpu_plan
from parts_fabric import BESIDE, MAIN, Order, PartsFabric
from parts_runs import case, fabrics, run

from mkernel.backends.accelerators.cuda import capabilities
from mkernel.backends.accelerators.cuda.collectives import mail
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.gemm import products
from mkernel.backends.accelerators.cuda.gemm.gather_parts import GatherPartsExecutor
from mkernel.backends.accelerators.cuda.gemm.library import LibraryExecutor
from mkernel.backends.accelerators.cuda.gemm.reduce_parts import ReducePartsExecutor
from mkernel.backends.accelerators.cuda.schedule import (
    GatherPartsSchedule,
    LibrarySchedule,
    PartsSchedule,
    ProductSchedule,
    ReducePartsSchedule,
)
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.dispatch import executor_of
from mkernel.backends.contracts import scaled as contract
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import PeerMemory
from mkernel.errors import ArgumentError, LayoutError, ShapeError, Unsupported
from mkernel.plan.arguments import Around, Norm
from mkernel.plan.model import LaunchPlan, Scales

OPS = capabilities.OPS
MODES = ("tensor", "row", "block")
LATE_S = 0.02
every_op = pytest.mark.parametrize("op", OPS)
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the fabric of a world."""
    return fabrics(monkeypatch)


def planned(
    op: str, m: int, n: int, k: int, world: int, mode: Any = "row", *,
    bias: bool = False, chunks: int | None = None, fast: bool = False,
    scaled_by: str = "library", norm: Norm | None = None, **options: Any,
) -> LaunchPlan:  # fmt: skip
    """``chunks``: parts of each rank's rows; 0: the whole; None: as planned. ``scaled_by``: products,
    which a kernel takes in the dtype of results."""
    of_a_build_with_kernels = {
        "ops": OPS, "library_ops": OPS, "scale_modes": MODES, "fused_scale_modes": MODES[:-1],
        "fused_float32_scale_modes": MODES[:2],
    }  # fmt: skip
    claims = HopperAccelerator().capabilities().model_copy(update=of_a_build_with_kernels)
    around = Around(bias=bias, norm=norm, scales=Scales(mode=mode, use_fast_accum=fast))
    given = {"dtype": "float8_e4m3fn", "b_layout": "column", "capabilities": claims, **options}
    made = gpu_plan(
        HopperAccelerator(), op, world, {"m": m, "n": n, "k": k}, around=around, **given
    )
    if chunks is None:
        return made
    product = made.part(ProductSchedule).product if scaled_by == "library" else made.out_dtype
    common: Any = {"product": product, "scaled_by": scaled_by}
    how: Any = made.schedule
    if chunks and op == "all_gather_gemm":
        how = GatherPartsSchedule(**common, chunks=chunks)
    elif chunks:
        how = ReducePartsSchedule(**common, chunks=chunks, sum_blocks=264)
    else:
        summed = op == "gemm_all_reduce" and world > 1
        how = LibrarySchedule(**common, way="two_shot" if summed else None)
    return made.model_copy(update={"schedule": how})


@pytest.mark.parametrize("chunks", [0, 1, 2, 3])
@every_mode
@every_op
def test_results(fabric: Any, op: str, mode: str, chunks: int) -> None:
    for world, rows in ((2, 12), (3, 7)):
        m = rows * world
        run(planned(op, m, 144, 384, world, mode, chunks=chunks), fabric(world))


@pytest.mark.parametrize("chunks", [0, 2])
@every_op
def test_results_of_one_rank_and_of_float16(fabric: Any, op: str, chunks: int) -> None:
    run(planned(op, 10, 32, 128, 1, "block", chunks=0), fabric(1))
    run(planned(op, 10, 32, 128, 2, chunks=chunks, out_dtype="float16"), fabric(2), late=1)


@pytest.mark.parametrize("rows", range(80, 84))
@every_op
def test_scales_of_one_block_of_k_are_read_at_multiples_of_16_bytes(
    fabric: Any, op: str, rows: int
) -> None:
    """Such scales need no transposing, so those of a part lie within the caller's."""
    run(planned(op, 2 * rows, 144, 128, 2, "block", chunks=3), fabric(2))


@pytest.mark.parametrize("chunks", [0, 2])
@pytest.mark.parametrize("mode", ["tensor", "row"])
@every_op
def test_a_kernel_scales_products(fabric: Any, op: str, mode: str, chunks: int) -> None:
    made = planned(op, 256, 512, 64, 2, mode, chunks=chunks, scaled_by="kernel")
    run(made, fabric(2), symmetric=chunks == 2)
    for fields in ({"product": "float32"}, {"scaled_by": None}):
        how = made.part(ProductSchedule).model_copy(update=fields)
        with pytest.raises(ArgumentError, match=r"plan\.schedule\.scaled_by"):
            executor_of(made).workspace(made.model_copy(update={"schedule": how}))


def started(
    told: Mapping[str, Any], fabric: PartsFabric, given: Mapping[str, torch.Tensor]
) -> None:
    """A call as native code starts it (``host/gemm/bind_library_starter.cpp``), told so."""

    def made(allocation: Any) -> torch.Tensor:
        shape, strides, dtype = allocation[1]
        return torch.empty_strided(shape, strides, dtype=dtype)

    multiply, bias, together = told["scaled"], given.get("bias"), told["together"]
    of_b, out = (given["b"], given["b_scale"]), given["out"]
    if fabric.world == 1:
        multiply(given["a"], given["a_scale"], *of_b, bias, out)
        return
    between, columns = made(told["scratch"]), told["columns"]
    if told["op"] == "all_gather_gemm":
        scales = made(told["scales"])
        beside = given["a_scale"].data_ptr(), told["scale_bytes"], scales.data_ptr()
        rows = given["a"].data_ptr(), told["shard_bytes"], [between.data_ptr()]
        fabric.all_gather(together, *rows, MAIN, *beside)
        multiply(between, scales, *of_b, bias, out)
        return
    assert told["scales"] is None
    multiply(given["a"], given["a_scale"], *of_b, None, between)
    element, row = told["element"], {"bias": 0 if bias is None else bias.data_ptr()}
    sent, to = between.data_ptr(), out.data_ptr()
    row["columns"] = columns
    if told["op"] == "gemm_reduce_scatter":
        part = told["elements"] // fabric.world
        fabric.reduce_scatter(together, element, sent, part, to, MAIN, **row)
    else:
        way = told["way"]
        fabric.all_reduce(together, element, sent, told["elements"], [to], way, MAIN, **row)


# A kernel scales what is rounded once, by rows.
STARTED = [
    *((mode, "library", bias) for mode in MODES for bias in (False, True)),
    *((mode, "kernel", False) for mode in MODES[:-1]),
]


@pytest.mark.parametrize(("mode", "scaled_by", "bias"), STARTED)
@pytest.mark.parametrize("world", [1, 2])
@every_op
def test_what_native_code_starts_is_the_same_call(
    fabric: Any, op: str, world: int, mode: str, scaled_by: str, bias: bool
) -> None:
    """Single scales as callers may have them: without a dimension."""
    stands = fabric(world)
    made = planned(op, 16, 32, 128, world, mode, bias=bias, chunks=0, scaled_by=scaled_by)
    of = case(made)
    rows = 16 // world if op == "gemm_reduce_scatter" else 16

    def start(rank: int) -> None:
        call = Call(
            plan=made, rank=rank, tensors={}, epoch=1, number=1, pad=0,
            workspace=stands.workspace(rank), areas=(0,),
            peers={p: PeerMemory(0, stands.workspace(p)) for p in range(world) if p != rank},
            region=0, fifo=0, timeout_s=1.0,
        )  # fmt: skip
        order: Any = Order(stands.told[rank])
        context = DispatchContext(0, order, 64, one=torch.ones(1, 1))
        told: Any = executor_of(made)(call, context).starter({}, {})
        for turn in range(2):
            given = of.inputs(rank, world, turn)
            if mode == "tensor":
                given |= {name: given[name].view(()) for name in ("a_scale", "b_scale")}
            out = torch.full((rows, 32), torch.nan, dtype=torch.bfloat16)
            started(told, stands, {**given, "out": out})
            found = of.compared({"out": out}, rank, world, turn)
            assert of.passed(found), f"rank {rank} call {turn}: {found}"

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(start, range(world)))


@pytest.mark.parametrize(
    ("mode", "rows", "mailed"), [("row", 3840, True), ("block", 3840, False), ("block", 3584, True)]
)
def test_mail_has_room_for_the_scales_beside_rows(
    fabric: Any, mode: str, rows: int, mailed: bool
) -> None:
    """Scales by blocks are a 32nd of their rows, which beside the bytes that say zeros is too much."""
    made = planned("all_gather_gemm", 2 * rows, 256, 2048, 2, mode, path="library")
    how = made.part(LibrarySchedule)
    scales = 4 * rows * (1 if mode == "row" else 2048 // 128)
    sent = mail.of_plan(made, how.product, how.way)
    assert 0 <= sent - 2 * 17 * (rows * 2048 + scales) // 16 < 2 * 128
    assert how.by_mail == mailed == (sent <= mail.MAIL_BYTES)
    fabric(2)
    executor = executor_of(made)
    executor.workspace(made)
    other = how.model_copy(update={"by_mail": True})
    if not mailed:
        with pytest.raises(
            ArgumentError, match=rf"plan\.schedule\.by_mail.*would send {sent} bytes"
        ):
            executor.workspace(made.model_copy(update={"schedule": other}))


@pytest.mark.parametrize(("m", "mailed"), [(2048, True), (2056, False)])
def test_sums_in_two_exchanges_go_by_mail(fabric: Any, m: int, mailed: bool) -> None:
    """16-bit results of 8 to 16 MiB."""
    made = planned("gemm_all_reduce", m, 4096, 256, 2, path="library")
    how = made.part(LibrarySchedule)
    assert (how.way, how.by_mail) == ("two_shot", mailed)
    fabric(2)
    executor_of(made).workspace(made)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("m", [1, 64, 512, 8192])
def test_who_normalises(fabric: Any, m: int, bias: bool) -> None:
    """The kernel that takes the rows by mail, as rows of 16-bit operands."""
    norm = Norm(True, 1e-6)
    made = planned("gemm_all_reduce", m, 1024, 256, 2, path="library", bias=bias, norm=norm)
    how = made.part(LibrarySchedule)
    assert how.by_mail
    assert how.normalises == (not bias and (how.way == "one_shot" or how.product == "bfloat16"))
    fabric(2)
    executor_of(made).workspace(made)
    plain = planned("gemm_all_reduce", m, 1024, 256, 2, path="library", bias=bias)
    assert not plain.part(LibrarySchedule).normalises


@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_rows_of_a_sum_that_do_not_divide(fabric: Any, m: int) -> None:
    for chunks in (0, 1):
        run(planned("gemm_all_reduce", m, 32, 64, 3, chunks=chunks), fabric(3))


@pytest.mark.parametrize("chunks", [0, 2])
@every_mode
@every_op
def test_a_bias_is_added_before_the_only_rounding(
    fabric: Any, op: str, mode: str, chunks: int
) -> None:
    made = planned(op, 16, 32, 128, 2, mode, bias=True, chunks=chunks)
    assert made.bias == "launch"
    run(made, fabric(2))
    if op == "all_gather_gemm":
        how = made.schedule
        assert isinstance(how, LibrarySchedule | PartsSchedule)
        assert how.product == "float32"
        rounded = how.model_copy(update={"product": "bfloat16"})
        with pytest.raises(ArgumentError, match=r"plan\.schedule\.product.*float32"):
            executor_of(made).workspace(made.model_copy(update={"schedule": rounded}))


@pytest.mark.parametrize("chunks", [0, 1, 3])
@every_mode
def test_gathered_rows_and_scales_are_outputs_too(fabric: Any, mode: str, chunks: int) -> None:
    made = planned("all_gather_gemm", 18, 32, 256, 3, mode, chunks=chunks)
    for tensors in run(made, fabric(3), gathered=True):
        whole = [case(made).inputs(rank, 3, 2) for rank in range(3)]
        for name, part in (("gathered", "a"), ("gathered_scale", "a_scale")):
            wanted = torch.cat([each[part] for each in whole])
            assert torch.equal(tensors[name].float(), wanted.float())


@pytest.mark.parametrize("symmetric", [False, True])
def test_sums_are_the_same_bits_everywhere_and_by_either_way(fabric: Any, symmetric: bool) -> None:
    found = []
    for chunks in (0, 1, 2, 4):
        made = planned("gemm_all_reduce", 24, 48, 128, 3, chunks=chunks)
        found += [each["out"] for each in run(made, fabric(3), symmetric=symmetric)]
    assert all(torch.equal(each, found[0]) for each in found)


@every_op
def test_copies_run_beside_products_and_each_part_is_awaited(fabric: Any, op: str) -> None:
    made = fabric(2)
    run(planned(op, 32, 32, 64, 2, chunks=2), made, calls=1)
    told = made.told[0]
    pushes = [each for each in told if each[0] == "push"]
    rows = 8 * 64 if op == "all_gather_gemm" else 8 * 32 * 4
    parts = [("push", 1, rows, flag, BESIDE) for flag in (0, 1)]
    awaited = [("await", 1, 2), ("await", 1, 3)]
    if op == "all_gather_gemm":
        assert told == ["fork", ("push", 1, 64, -1, BESIDE), *parts, *awaited, "join", "end"]
    elif op == "gemm_reduce_scatter":
        sums = [("sum", 8 * 32, 264, False), ("sum", 8 * 32, 264, True)]
        assert told == [
            "fork", parts[0], "fork", parts[1], awaited[0], sums[0], awaited[1], "join", sums[1],
        ]  # fmt: skip
    else:
        assert [each[2:] for each in pushes[2:]] == [(8 * 32 * 2, flag, BESIDE) for flag in (4, 5)]
        assert told[-4:] == [("await", 1, 6), ("await", 1, 7), "join", "end"]


@every_op
def test_the_sequential_view_copies_between_the_products(fabric: Any, op: str) -> None:
    made = fabric(2)
    run(planned(op, 32, 32, 64, 2, chunks=2), made, view="sequential")
    assert "fork" not in made.told[0]
    assert {each[4] for each in made.told[0] if each[0] == "push"} == {MAIN}


@pytest.mark.parametrize("chunks", [0, 2])
@every_op
def test_compute_only_exchanges_nothing(fabric: Any, op: str, chunks: int) -> None:
    made = fabric(2)
    run(planned(op, 32, 32, 64, 2, chunks=chunks), made, view="compute_only")
    assert made.told == [[], []]
    assert made.called == []


# ---- faults that the checks here must catch ------------------------------------------------------


@every_op
def test_parts_that_nobody_awaits_are_wrong(
    fabric: Any, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, passed = fabric(2), threading.Event()
    monkeypatch.setattr(made, "await_part", lambda *_: passed.set())
    with pytest.raises(AssertionError, match="rank 0 call"):
        run(planned(op, 32, 32, 64, 2, chunks=1), made, calls=1, late=1, behind=passed)


@pytest.mark.parametrize("chunks", [0, 1])
@pytest.mark.parametrize("mode", ["row", "block"])
def test_scales_of_the_call_before_are_wrong(
    fabric: Any, mode: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, kept = fabric(2), {}

    class Late(products.ScaledFactor):
        def product(self, a: Any, scale: Any, out: Any) -> None:
            before = kept.get((id(type(self)), tuple(scale.shape), out.data_ptr()))
            kept[id(type(self)), tuple(scale.shape), out.data_ptr()] = scale.clone()
            super().product(a, scale if before is None else before, out)

    monkeypatch.setattr(products, "ScaledFactor", Late)
    with pytest.raises(AssertionError, match="call 2"):
        run(planned("all_gather_gemm", 32, 32, 256, 2, mode, chunks=chunks), made)


@every_op
def test_scales_of_other_rows_are_wrong(
    fabric: Any, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fabric(2)

    class Shifted(products.ScaledFactor):
        def product(self, a: Any, scale: Any, out: Any) -> None:
            super().product(a, scale.roll(1, 0), out)

    monkeypatch.setattr(products, "ScaledFactor", Shifted)
    with pytest.raises(AssertionError, match="rank"):
        run(planned(op, 32, 32, 64, 2, chunks=1), made, calls=1)


@every_op
def test_a_block_of_k_without_its_scale_is_wrong(
    fabric: Any, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fabric(2)

    class Forgetful(products.ScaledFactor):
        def product(self, a: Any, scale: Any, out: Any) -> None:
            scale = scale.clone()
            scale[:, 1] = 1
            super().product(a, scale, out)

    monkeypatch.setattr(products, "ScaledFactor", Forgetful)
    with pytest.raises(AssertionError, match="rank"):
        run(planned(op, 32, 32, 256, 2, "block", chunks=1), made, calls=1)


# ---- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES[:2])
@every_op
def test_plans_take_the_path_that_is_asked_for_or_the_faster_one(op: str, mode: Any) -> None:
    times = {}
    for path in ("fused", "library"):
        made = planned(op, 128, 256, 512, 2, mode, path=path)
        assert made.path == path
        assert (executor_of(made) is LibraryExecutor) == (path == "library")
        assert made.prediction is not None
        times[path] = made.prediction.pipelined_us
    assert min(times.values()) > 0
    assert planned(op, 128, 256, 512, 2, mode).path == min(times, key=times.__getitem__)


FASTEST: dict[str, tuple[int, ...]] = {
    "all_gather_gemm": (0, 0, 1, 1, 1),
    "gemm_reduce_scatter": (0, 0, 2, 1, 1),
    "gemm_all_reduce": (0, 0, 2, 2, 4),
}
"""Chunks of the library's ways that were fastest on two H100, with scales by rows, within 2 %; 0: the
whole."""


@every_op
def test_the_way_that_was_measured_as_the_fastest_is_taken(op: str) -> None:
    sizes = ((128, 5120, 8192), (1024, 5120, 8192), (8192, 2048, 8192), (8192, 7168, 8192),
             (8192, 14336, 4096))  # fmt: skip
    plans = [planned(op, *size, 2, path="library") for size in sizes]
    assert tuple(getattr(plan.schedule, "chunks", 0) for plan in plans) == FASTEST[op]
    ways = [plan.part(ProductSchedule).scaled_by for plan in plans]
    assert ways == ["kernel", *["library"] * 4]
    times = plans[2].prediction
    assert times is not None
    assert max(times.compute_us, times.comm_us) < times.pipelined_us < times.sequential_us


@every_op
def test_parts_are_of_as_many_rows_as_are_wished(op: str) -> None:
    made = planned(op, 8192, 2048, 8192, 2, chunk=1024, path="library")
    gathers = op == "all_gather_gemm"
    assert executor_of(made) is (GatherPartsExecutor if gathers else ReducePartsExecutor)
    how = made.part(PartsSchedule)
    assert how.chunks == 4
    assert how.copy_engines


def test_a_plan_says_how_products_accumulate() -> None:
    plans = [planned("all_gather_gemm", 8192, 2048, 8192, 2, fast=fast) for fast in (False, True)]
    assert len({plan.digest() for plan in plans}) == 2


def test_what_torch_has_no_product_for_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="use_fast_accum = True"):
        planned("gemm_all_reduce", 64, 64, 128, 2, "block", fast=True)
    with pytest.raises(LayoutError, match=r"b\.t\(\)\.contiguous\(\)\.t\(\)"):
        planned("all_gather_gemm", 64, 64, 64, 2, b_layout="row")
    with pytest.raises(ShapeError, match="n = 72"):
        planned("gemm_all_reduce", 64, 72, 64, 2)
    with pytest.raises(ShapeError, match="k = 192"):
        planned("gemm_all_reduce", 64, 64, 192, 2, "block")
    made = planned("gemm_reduce_scatter", 64, 64, 64, 2, chunks=0)
    several = made.model_copy(update={"nodes": 2, "ranks_per_node": 1})
    with pytest.raises(Unsupported, match="one node"):
        executor_of(made).workspace(several)


@every_op
def test_schedules_that_calls_would_not_follow_are_refused(fabric: Any, op: str) -> None:
    fabric(2)
    made = planned(op, 32, 32, 64, 2, chunks=1)
    how = made.part(PartsSchedule)
    for field, value in (("product", "float16"), ("chunks", 17)):
        other = made.model_copy(update={"schedule": how.model_copy(update={field: value})})
        with pytest.raises(ArgumentError, match=rf"plan\.schedule\.{field}"):
            executor_of(other).workspace(other)
    alone = planned(op, 32, 32, 64, 1).model_copy(update={"schedule": how})
    with pytest.raises(ArgumentError, match="one rank"):
        executor_of(alone).workspace(alone)


def test_scales_are_claimed_with_a_torch_that_has_their_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for version, claimed in (("2.9.1", ()), ("2.11.0+cu130", MODES), ("unknown", ())):
        monkeypatch.setattr(capabilities.metadata, "version", lambda _, found=version: found)
        assert capabilities.scale_modes() == claimed


def test_the_numbers_of_torch_s_recipes() -> None:
    kinds, swizzles = torch.nn.functional.ScalingType, torch.nn.functional.SwizzleType
    found = kinds.BlockWise1x128.value, kinds.BlockWise128x128.value, swizzles.NO_SWIZZLE.value
    assert found == (contract._BY_ROW_BLOCKS, contract._BY_BLOCKS, contract._PLAIN)
