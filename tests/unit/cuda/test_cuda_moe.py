"""Experts on the backend for CUDA devices: dispatches and combines by its kernels, for which a stand-in
stands, and torch's product of groups between them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_plans import gpu_plan

from mkernel.backends.accelerators.cuda.backend import CudaAccelerator
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.moe import executors, grouped
from mkernel.backends.accelerators.cuda.moe.executors import CombineExecutor, RowsExecutor
from mkernel.backends.accelerators.cuda.moe.grouped import (
    LibraryCombineExecutor,
    LibraryDispatchExecutor,
)
from mkernel.backends.accelerators.cuda.schedule import LibraryCombineSchedule, RowsSchedule
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import PeerMemory
from mkernel.errors import Unsupported
from mkernel.plan.model import LaunchPlan
from mkernel.plan.shapes import size_names

WORLD, RANK, MAIN, OWN = 2, 1, 5, 4
TOKENS, TOP_K, HIDDEN, FEATURES = 12, 3, 64, 128
SIZES = {
    "tokens": TOKENS, "hidden": HIDDEN, "features": FEATURES, "experts": OWN * WORLD, "top_k": TOP_K,
}  # fmt: skip
PLACES = WORLD * TOKENS * TOP_K
CAPACITY = 48


def planned(op: str, **options: Any) -> LaunchPlan:
    sizes = {name: size for name, size in SIZES.items() if name in size_names(op)}
    changes = {
        name: options.pop(name)
        for name in ("capacity", "experts", "partial_dtype")
        if name in options
    }
    return gpu_plan(
        CudaAccelerator(), op, WORLD, {**sizes, **changes}, **{"dtype": "bfloat16", **options}
    )


def some_ids() -> torch.Tensor:
    """Ids of all ranks: of each expert but the first own one, and of none."""
    ids = torch.randint(-1, OWN * WORLD, (PLACES,), generator=torch.Generator().manual_seed(59))
    return ids.masked_fill(ids == RANK * OWN, -1).int()


def words_of(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """A routing's words, as far as products read them, and the world's mark behind them."""
    words = torch.full((3 * PLACES + 40,), -7, dtype=torch.int32)
    words[:PLACES], words[-4] = ids, rows
    return words


def call_of(plan: LaunchPlan, tensors: dict[str, torch.Tensor], view: Any = "pipelined") -> Call:
    return Call(
        plan=plan, rank=RANK, tensors=tensors, epoch=1, number=1, pad=0, workspace=1 << 30,
        areas=(0,), peers={0: PeerMemory(0, 1 << 21)}, region=0, fifo=0, timeout_s=1.0, view=view,
    )  # fmt: skip


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def expected(rows: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The products of rows in the order of their experts, in float64."""
    local = (ids[(ids >= RANK * OWN) & (ids < (RANK + 1) * OWN)] - RANK * OWN).sort().values
    made = [rows[i].double() @ w[expert].double() for i, expert in enumerate(local.tolist())]
    return torch.stack(made)


class Native:
    """Stands for the native module. What copies rows gives ``rows``; what brings results home notes
    them."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.started, self.home = rows, list[str](), list[Any]()
        self.HomeStep = SimpleNamespace(
            send_rows="send_rows", sum_slots="sum_slots", sum_rows="sum_rows", sum_ranks="sum_ranks"
        )

    def __getattr__(self, name: str) -> Any:
        if name[0].isupper():  # a class, whose fields are what is noted
            return SimpleNamespace
        return lambda *given: self.started.append(name)

    def shares_device(self, device: int, world: Any) -> bool:
        return False

    def MoeSizes(self, **given: int) -> Any:
        return SimpleNamespace(dispatch_bytes=lambda *given: 100, home_bytes=lambda *given: 200)

    def copy_rows(self, device: int, world: Any, copies: Any, stream: int) -> None:
        self.started.append("copy_rows")
        given = torch.zeros(copies.height, self.rows.shape[1], dtype=torch.bfloat16)
        given[: len(self.rows)] = self.rows
        ctypes.memmove(copies.out, given.data_ptr(), given.nbytes)

    def moe_home(self, device: int, world: Any, home: Any, step: str, stream: int) -> None:
        self.started.append(step)
        self.home.append(home)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    ids = some_ids()
    rows = int(((ids >= RANK * OWN) & (ids < (RANK + 1) * OWN)).sum())
    module = Native(noise(rows, HIDDEN, seed=1))
    monkeypatch.setattr(executors, "native", lambda: module)
    monkeypatch.setattr(executors, "device_world", lambda *given: SimpleNamespace(of_call=print))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return module


def context() -> DispatchContext:
    order: Any = SimpleNamespace(fork=lambda stream: 6, join=lambda stream: None)
    return DispatchContext(0, order, 64, reports=SimpleNamespace(block=None))  # type: ignore[arg-type]


def test_each_op_has_an_executor_and_a_schedule() -> None:
    found = {op: planned(op, capacity=CAPACITY) for op in ("moe_dispatch", "moe_dispatch_gemm")}
    found |= {op: planned(op) for op in ("moe_combine", "moe_gemm_combine")}
    assert {op: CudaAccelerator.executor_of(plan) for op, plan in found.items()} == {
        "moe_dispatch": RowsExecutor,
        "moe_dispatch_gemm": LibraryDispatchExecutor,
        "moe_combine": CombineExecutor,
        "moe_gemm_combine": LibraryCombineExecutor,
    }
    assert isinstance(found["moe_dispatch_gemm"].schedule, RowsSchedule)
    assert isinstance(found["moe_gemm_combine"].schedule, LibraryCombineSchedule)


@pytest.mark.parametrize("refused", [False, True])
def test_rows_end_where_their_experts_do(refused: bool) -> None:
    ids = some_ids()
    counts = torch.bincount(ids[ids >= RANK * OWN] - RANK * OWN, minlength=OWN)
    rows = 0 if refused else int(counts.sum())
    plan = planned("moe_dispatch_gemm", capacity=CAPACITY)
    found = grouped._ends(call_of(plan, {"routing": words_of(ids, rows)}), OWN, CAPACITY)
    ends = [0, 0, 0] if refused else counts.cumsum(0).tolist()[:-1]
    assert counts[0] == 0 < rows < CAPACITY or refused
    assert found.tolist() == [*ends, CAPACITY]
    assert found.dtype == torch.int32


@pytest.mark.parametrize("layout", ["row", "column"])
def test_dispatched_rows_are_multiplied(native: Native, layout: str) -> None:
    ids, w = some_ids(), noise(OWN, HIDDEN, FEATURES, seed=2)
    if layout == "column":
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    count = len(native.rows)
    tensors = {
        "x": noise(TOKENS, HIDDEN, seed=3), "w": w, "routing": words_of(ids, count),
        "topk_ids": ids.view(WORLD, TOKENS, TOP_K)[RANK],
    }  # fmt: skip
    plan = planned("moe_dispatch_gemm", capacity=CAPACITY, b_layout=layout)
    call = call_of(plan, tensors)
    found = LibraryDispatchExecutor(call, context()).start(call, MAIN)
    assert {*found} == {"counts", "outputs"}
    assert [each for each in native.started if each != "push_wanted"] == [
        "push_whole", "moe_route", "copy_rows",
    ]  # fmt: skip
    got = found["outputs"]
    assert got.shape == (CAPACITY, FEATURES)
    assert (got[count:] == 0).all()
    wanted = expected(native.rows, w, ids)
    assert (got[:count].double() - wanted).norm() / wanted.norm() < 4e-3
    rolled = expected(native.rows, w.roll(1, 0), ids)  # a neighbour's weights are told apart
    assert (got[:count].double() - rolled).norm() / rolled.norm() > 1


@pytest.mark.parametrize(
    ("returns", "partials"), [("slots", "float32"), ("ranks", "bfloat16"), ("ranks", "float32")]
)
def test_products_go_home(native: Native, returns: str, partials: str) -> None:
    plan = planned("moe_gemm_combine", partial_dtype=partials)
    how = plan.part(LibraryCombineSchedule).model_copy(update={"returns": returns})
    plan = plan.model_copy(update={"schedule": how})
    ids, count = some_ids(), len(native.rows)
    h, w2 = noise(count, FEATURES, seed=4), noise(OWN, FEATURES, HIDDEN, seed=5)
    tensors = {
        "h": h, "w2": w2, "routing": words_of(ids, count), "out": noise(TOKENS, HIDDEN, seed=6),
        "topk_weights": torch.ones(TOKENS, TOP_K),
    }  # fmt: skip
    made = list[torch.Tensor]()
    product = grouped._product

    def noted(*given: Any) -> torch.Tensor:
        made.append(product(*given))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "_product", noted)
        call = call_of(plan, tensors)
        LibraryCombineExecutor(call, context()).start(call, MAIN)
    steps = ["send_rows", "sum_slots"] if returns == "slots" else ["sum_rows", "sum_ranks"]
    assert [each for each in native.started if each != "push_whole"] == steps
    wide = (returns, partials) == ("ranks", "float32")
    assert {home.wide for home in native.home} == {wide}
    assert {home.y == made[0].data_ptr() for home in native.home} == {not wide}
    assert {home.by_rank for home in native.home} == {returns == "ranks"}
    wanted = expected(h, w2, ids)
    assert (made[0].double() - wanted).norm() / wanted.norm() < 4e-3


def test_what_torch_does_not_multiply_is_refused() -> None:
    with pytest.raises(Unsupported, match="1024 experts on a rank: torch multiplies at most 1023"):
        planned("moe_gemm_combine", experts=1024 * WORLD)


@pytest.mark.parametrize(("dtype", "capability"), [("float16", (9, 0)), ("bfloat16", (8, 0))])
def test_a_graph_takes_no_product_that_waits(
    monkeypatch: pytest.MonkeyPatch, dtype: str, capability: tuple[int, int]
) -> None:
    plan = planned("moe_dispatch_gemm", dtype=dtype, capacity=CAPACITY)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(Unsupported, match="cannot capture moe_dispatch_gemm of"):
        grouped._expect_no_graph(plan)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    grouped._expect_no_graph(plan)
