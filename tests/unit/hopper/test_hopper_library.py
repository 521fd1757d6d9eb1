"""The library path's part on the host, on the native module's stand-in (``library_fabric``)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import pytest
import torch
from gpu_plans import gpu_plan
from library_fabric import DATA_OFFSET, STREAM, Fabric, workspace_of
from operand_forms import OPS as GEMMS
from operand_forms import RoundedOnce

from mkernel.backends.accelerators.cuda import capabilities, device_world, starters
from mkernel.backends.accelerators.cuda.collectives import landing, norm
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.gemm import library, products
from mkernel.backends.accelerators.cuda.gemm.library import LibraryExecutor
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.dispatch import FUSED, executor_of
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.instrumented import View
from mkernel.backends.contracts.memory import PeerMemory
from mkernel.cases.base import TOLERANCE
from mkernel.errors import Unsupported
from mkernel.plan.arguments import Around
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import LaunchPlan

OPS = capabilities.OPS
every_op = pytest.mark.parametrize("op", OPS)
worlds = pytest.mark.parametrize("world", [1, 2, 4])


CLAIMS = AcceleratorCapabilities(
    adds_bias=True, pitched=("a", "b"),
    ops=OPS, dtypes=("bfloat16", "float16"), out_dtypes=("bfloat16", "float16"),
    mixed_dtypes=False, b_layouts=("row", "column"), alignment_bytes=16, transfer_paths=("p2p",),
    peer_access=True, compute_cores=132, comm_cores=132, library_ops=OPS,
)  # fmt: skip


def planned(op: str, m: int, n: int, k: int, world: int, **options: Any) -> LaunchPlan:
    given = {"dtype": "bfloat16", "path": "library", "capabilities": CLAIMS, **options}
    return gpu_plan(HopperAccelerator(), op, world, {"m": m, "n": n, "k": k}, **given)


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Fabric]:
    """Makes the fabric of a world."""

    def on_cpu(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(a.float() @ b.float())

    def make(world: int) -> Fabric:
        made = Fabric(world)
        for module in (library, device_world, landing, norm, starters):
            monkeypatch.setattr(module, "native", lambda: made)
        monkeypatch.setattr(products, "mm", on_cpu)  # torch has float32 results on devices alone
        return made

    return make


def run(
    made: LaunchPlan,
    given: list[dict[str, torch.Tensor]] | None = None,
    *,
    view: View = "pipelined",
    gathered: bool = False,
    symmetric: bool = False,
    numbers: tuple[int, ...] = (3,),
) -> tuple[list[dict[str, torch.Tensor]], list[torch.Tensor]]:
    """Every rank's tensors after calls of these numbers, and what its ``out`` should be, in float64.
    ``given``: inputs of every rank, instead of others."""
    shape, world, dtype = made.gemm, made.world_size, getattr(torch, made.dtype)
    gathers = made.op == "all_gather_gemm"
    scatters = made.op == "gemm_reduce_scatter"
    random = torch.Generator().manual_seed(1)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random).to(dtype)

    everyone = [
        {
            "a": drawn(shape.m // world if gathers else shape.m, shape.k),
            "b": drawn(shape.k, shape.n),
            "out": torch.full(
                (shape.m // world if scatters else shape.m, shape.n), torch.nan, dtype=dtype
            ),
        }
        | (given[rank] if given else {})
        for rank in range(world)
    ]
    if gathered:
        for tensors in everyone:
            tensors["gathered"] = torch.full((shape.m, shape.k), torch.nan, dtype=dtype)
    shared = {
        name: tuple(each[name].data_ptr() for each in everyone)
        for name in ("out", "gathered")
        if symmetric and name in everyone[0]
    }

    def start(rank: int) -> None:
        order: Any = None
        calls: Any = None
        for number in numbers:
            call = Call(
                plan=made, rank=rank, tensors=everyone[rank], epoch=1, number=number, pad=0,
                workspace=workspace_of(rank), areas=(0,),
                peers={p: PeerMemory(0, workspace_of(p)) for p in range(world) if p != rank},
                region=0, fifo=0, timeout_s=float(number & 7), view=view, symmetric=shared,
            )  # fmt: skip
            calls = calls or LibraryExecutor(call, DispatchContext(0, order, 64))
            calls.start(call, STREAM)

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(start, range(world)))
    if gathers:
        whole = torch.cat([each["a"] for each in everyone]).double()
        return everyone, [whole @ each["b"].double() for each in everyone]
    total = torch.stack([each["a"].double() @ each["b"].double() for each in everyone]).sum(0)
    return everyone, list(total.chunk(world)) if scatters else [total] * world


def assert_right(
    everyone: list[dict[str, torch.Tensor]], wanted: list[torch.Tensor], dtype: str
) -> None:
    for tensors, right in zip(everyone, wanted, strict=True):
        error = (tensors["out"].double() - right).norm() / right.norm()
        assert error <= TOLERANCE[dtype]  # type: ignore[index]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@worlds
@every_op
def test_results(fabric: Any, op: str, world: int, dtype: str) -> None:
    for n in (8, 4096):  # a result that scatters, and one that does not
        fabric(world)
        everyone, wanted = run(planned(op, 8, n, 64, world, dtype=dtype))
        assert_right(everyone, wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@worlds
@every_op
def test_a_bias_is_added_before_the_only_rounding(
    fabric: Any, op: str, world: int, dtype: torch.dtype
) -> None:
    for rows, n in ((16, 8), (512, 1024)):  # sums of float32, and of the inputs' dtype
        made = RoundedOnce(GEMMS[op], world, rows, n, 64, dtype)
        fabric(world)
        m = rows * world if op == "all_gather_gemm" else rows
        name: Any = str(dtype).removeprefix("torch.")
        plan = planned(op, m, n, 64, world, dtype=name, around=Around(bias=True))
        assert plan.bias == "launch"
        given = [{"a": made.a[r], "b": made.b[r], "bias": made.bias} for r in range(world)]
        everyone, _ = run(plan, given)
        for tensors, wanted in zip(everyone, made.wanted, strict=True):
            assert torch.equal(tensors["out"], wanted)


@worlds
@pytest.mark.parametrize("symmetric", [False, True])
def test_gathered_is_an_output_too(fabric: Any, world: int, symmetric: bool) -> None:
    made = fabric(world)
    everyone, wanted = run(
        planned("all_gather_gemm", 16, 8, 64, world), gathered=True, symmetric=symmetric
    )
    assert_right(everyone, wanted, "bfloat16")
    whole = torch.cat([each["a"] for each in everyone])
    assert all(torch.equal(each["gathered"], whole) for each in everyone)
    assert made.called == ([("all_gather", symmetric)] if world > 1 else [])


@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_all_reduce"])
def test_large_sums_travel_in_the_inputs_dtype(fabric: Any, op: str) -> None:
    for n, sent in ((64, "float32"), (72, "float16")):
        made = fabric(2)
        everyone, wanted = run(planned(op, 1024, n, 8, 2, dtype="float16"))
        assert_right(everyone, wanted, "float16")
        ((_, element, *_),) = made.called
        assert element == (sent, "float16")


def test_one_exchange_for_small_sums_and_two_for_large_ones(fabric: Any) -> None:
    for world, m, way in ((4, 64, "one_shot"), (4, 512, "two_shot"), (2, 1024, "one_shot")):
        made = fabric(world)
        everyone, wanted = run(planned("gemm_all_reduce", m, 1024, 16, world), symmetric=True)
        assert_right(everyone, wanted, "bfloat16")
        ((used, _, symmetric),) = made.called
        assert (used, symmetric) == (way, way == "two_shot")


@every_op
def test_each_call_tells_its_own_number_and_deadline(fabric: Any, op: str) -> None:
    made = fabric(2)
    everyone, wanted = run(planned(op, 64, 64, 64, 2), numbers=(3, 4, (1 << 32) + 5))
    assert_right(everyone, wanted, "bfloat16")
    assert made.numbers == [3, 4, 5]  # kernels note 32 bits of it
    assert made.timeouts_s == [3.0, 4.0, 5.0]


@every_op
def test_compute_only_exchanges_nothing(fabric: Any, op: str) -> None:
    made = fabric(2)
    run(planned(op, 64, 64, 64, 2), view="compute_only")
    assert made.called == []


@every_op
def test_a_plan_has_the_executor_and_the_workspace_of_its_path(fabric: Any, op: str) -> None:
    fabric(4)
    made = planned(op, 256, 64, 64, 4)
    assert executor_of(made.model_copy(update={"path": "fused"})) is FUSED[op]
    assert executor_of(made) is LibraryExecutor
    alone = LibraryExecutor.workspace(planned(op, 64, 64, 64, 1)).areas
    assert LibraryExecutor.workspace(made).areas > alone == (DATA_OFFSET,)
    several = made.model_copy(update={"nodes": 2, "ranks_per_node": 2})
    with pytest.raises(Unsupported, match="one node"):
        LibraryExecutor.workspace(several)


@pytest.mark.parametrize(
    ("version", "fit"),
    [
        ("2.7.1", False), ("2.8.0", True), ("2.8.0a0+git1234", True), ("2.13.0+cpu", True),
        ("3.0", True), ("1.13.1", False), ("unknown", False),
    ],
)  # fmt: skip
def test_the_path_needs_products_in_float32(
    monkeypatch: pytest.MonkeyPatch, version: str, fit: bool
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert capabilities.torch_is_fit() == fit
    assert capabilities.library_ops() == (OPS if fit else ())


def test_the_version_says_what_torch_itself_says() -> None:
    assert capabilities.torch_is_fit() == hasattr(torch.ops.aten.mm, "dtype_out")


OUTS = (4096, 8192)


@pytest.mark.parametrize(
    ("op", "m", "n", "world", "product", "rounded", "between", "outs"),
    [
        ("all_gather_gemm", 16, 8, 2, "float32", True, ((16, 64), "bfloat16"), ()),
        ("all_gather_gemm", 1024, 1024, 2, "bfloat16", False, ((1024, 64), "bfloat16"), ()),
        ("gemm_reduce_scatter", 64, 64, 2, "float32", False, ((64, 64), "float32"), ()),
        ("gemm_reduce_scatter", 1024, 1024, 2, "bfloat16", False, ((1024, 1024), "bfloat16"), ()),
        ("gemm_all_reduce", 64, 64, 2, "float32", False, ((64, 64), "float32"), ()),
        ("gemm_all_reduce", 4096, 1024, 4, "bfloat16", False, ((4096, 1024), "bfloat16"), OUTS),
        ("gemm_all_reduce", 64, 64, 1, "float32", True, ((64, 64), "float32"), ()),
    ],
)  # fmt: skip
def test_what_native_code_is_told_of_a_plan(
    fabric: Any,
    op: str,
    m: int,
    n: int,
    world: int,
    product: str,
    rounded: bool,
    between: tuple[tuple[int, int], str],
    outs: tuple[int, ...],
) -> None:
    """The product's dtype, what ``out`` is rounded from, what lies between product and collective, and
    where every rank's ``out`` lies if kernels write to all of them."""
    fabric(world)
    plan = planned(op, m, n, 64, world)
    call = Call(
        plan=plan, rank=0, tensors={}, epoch=1, number=1, pad=0, workspace=workspace_of(0),
        areas=(0,), peers={p: PeerMemory(0, workspace_of(p)) for p in range(1, world)},
        region=0, fifo=0, timeout_s=1.0,
    )  # fmt: skip
    order: Any = None
    told: Any = LibraryExecutor(call, DispatchContext(0, order, 64)).starter({"out": OUTS}, {})
    wide = (torch.float32,) if product == "float32" else ()
    assert told["more"] == wide
    assert told["op"] == op
    assert (told["elements"], told["columns"]) == (m * n, n)
    assert told["shard_bytes"] == m // world * 64 * 2
    assert tuple(told["outs"]) == outs
    rows, eps = told["sums"]
    assert (rows["rows"], rows["columns"], rows["half"], eps) == (m, n, False, None)
    assert rows["twice"] == (told["way"] == "two_shot")

    def shape_and_dtype(allocation: Any) -> tuple[tuple[int, int], str]:
        (shape, strides, dtype) = allocation[1]
        assert strides == (shape[1], 1)
        return shape, str(dtype).removeprefix("torch.")

    assert shape_and_dtype(told["scratch"]) == between
    assert (told["whole"] is not None) == rounded
    if rounded:
        assert shape_and_dtype(told["whole"]) == ((m, n), "float32")


@pytest.mark.parametrize("twice", [False, True])
def test_native_code_takes_the_rows_that_a_plan_sums(made: Any, twice: bool) -> None:
    plan = planned("gemm_all_reduce", 64, 64, 64, 2)
    assert isinstance(starters.summed_rows(plan, 66, twice), made.SummedRows)
