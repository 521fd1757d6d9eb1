"""Which products go to cuBLAS without torch, and what native code is told of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from library_fabric import Fabric, workspace_of
from parts_runs import call_of, fabrics
from test_hopper_library import OPS, every_op, planned
from test_hopper_parts import in_parts

from mkernel.backends.accelerators.cuda import device_world, long_products, starters
from mkernel.backends.accelerators.cuda.collectives import norm
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.gemm import cublas, library
from mkernel.backends.accelerators.cuda.gemm.cublas import (
    ROOM_BYTES,
    WORKSPACE_BYTES,
    product_of,
    switches,
)
from mkernel.backends.accelerators.cuda.gemm.library import LibraryExecutor
from mkernel.backends.accelerators.cuda.long_products import Matrix
from mkernel.backends.accelerators.cuda.schedule import ProductSchedule
from mkernel.backends.accelerators.hopper.dispatch import executor_of
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import PeerMemory
from mkernel.plan.model import DtypeName, LaunchPlan
from mkernel.plan.two_generation_cache import TwoGenerationCache

TORCHS: Any = {"torchs": True}
"""Stands for torch's product."""

Strides = dict[str, Sequence[int]]


def cublas_product(*how: Any) -> dict[str, Any]:
    """Stands for native code's: what it is told, by name."""
    names = ("torchs", "world", "bfloat16", "widens", "n", "k", "a", "b", "switches")
    return dict(zip(names, how, strict=True))


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(cublas_product=cublas_product)
    monkeypatch.setattr(cublas, "native", lambda: made)


def context(opened: Any = "opened") -> DispatchContext:
    order: Any = None
    return DispatchContext(0, order, 64, cublas=opened)


def packed(plan: LaunchPlan) -> Strides:
    """Of a call's tensors, all row-major without gaps."""
    n, k = plan.gemm.n, plan.gemm.k
    return {"a": (k, 1), "b": (n, 1), "out": (n, 1)}


def told(plan: LaunchPlan, opened: Any = "opened", **strides: Sequence[int]) -> dict[str, Any]:
    found: Any = product_of(plan, context(opened), packed(plan) | strides, TORCHS)
    return found  # type: ignore[no-any-return]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@every_op
def test_native_code_is_told_of_dtypes_and_sizes(op: str, dtype: str) -> None:
    for rows, n in ((16, 64), (4096, 1024)):  # products in float32, and in the operands' dtype
        plan = planned(op, rows, n, 264, 2, dtype=dtype)
        wide = plan.part(ProductSchedule).product == "float32"
        assert wide == (rows == 16)
        found = told(plan)
        assert found["torchs"] is TORCHS
        assert found["world"] == "opened"
        assert (found["bfloat16"], found["widens"]) == (dtype == "bfloat16", wide)
        assert (found["n"], found["k"]) == (n, 264)
        assert (found["a"], found["b"]) == ((False, 264), (False, n))


@pytest.mark.usefixtures("native")
@every_op
def test_native_code_is_told_how_operands_lie(op: str) -> None:
    plan = planned(op, 4096, 1024, 264, 2)
    assert told(plan, b=(1040, 1))["b"] == (False, 1040)
    assert told(plan, b=(1, 264))["b"] == (True, 264)
    assert told(plan, b=(1, 300))["b"] == (True, 300)
    rows = told(plan, a=(512, 1))["a"], told(plan, a=(1, 4100))["a"]
    gathered = (False, 264)  # rows of all ranks, one after the other
    assert rows == ((gathered,) * 2 if op == "all_gather_gemm" else ((False, 512), (True, 4100)))


@pytest.mark.usefixtures("native")
@every_op
def test_torch_keeps_what_it_does_not_give_cublas_as_it_lies(op: str) -> None:
    plan = planned(op, 4096, 1024, 264, 2)
    assert told(plan) is not TORCHS
    assert told(plan, opened=None) is TORCHS
    for b in ((2048, 2), (0, 1), (1, 0), (1023, 1), (1, 263), (1 << 31, 1)):
        assert told(plan, b=b) is TORCHS, b
    nothing: Any = product_of(plan, context(), {}, TORCHS)
    assert nothing is TORCHS
    gathers = op == "all_gather_gemm"
    assert (told(plan, a=(0, 1)) is TORCHS) == (not gathers)
    assert (told(plan, out=(2048, 1)) is TORCHS) == gathers


@pytest.mark.usefixtures("native")
@every_op
def test_torch_keeps_kinds_that_may_lose_terms(op: str) -> None:
    """Until one was tried and has them all, with the switches as they are usually."""
    for k, ours in ((504, True), (512, True), (520, False), (640, True)):
        assert (told(planned(op, 512, 1024, k, 2)) is not TORCHS) == ours
    assert told(planned(op, 4096, 1024, 520, 2)) is not TORCHS  # too many results to be split


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("m", [16, 512])  # products in float32, and in the operands' dtype
@pytest.mark.parametrize("by_columns", [False, True])
@every_op
def test_kinds_that_were_tried(
    op: str, by_columns: bool, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(op, m, 1024, 520, 2)
    of_b = (1, 520) if by_columns else (1024, 1)
    bfloat16, product = torch.bfloat16, plan.part(ProductSchedule).product
    kind = long_products._kind(
        torch.device("cuda", 0),
        (
            Matrix(bfloat16, (m, 520), (520, 1)),
            Matrix(bfloat16, (520, 1024), of_b),
            Matrix(getattr(torch, product), (m, 1024), (1024, 1)),
        ),
        (0, 0, 0),
        None,
    )
    for right in (True, False):
        monkeypatch.setattr(long_products, "_right", TwoGenerationCache())
        long_products._right[kind] = right
        assert (told(plan, b=of_b) is not TORCHS) == right
        assert told(plan, b=(1, 520) if not by_columns else (1024, 1)) is TORCHS
        assert told(plan, b=(1032, 1)) is TORCHS
    long_products._right[kind] = True
    with flipped("allow_bf16_reduced_precision_reduction")():
        long_products._right[long_products._kind(kind[0], kind[4:7], (0, 0, 0), None)] = True
        assert told(plan, b=of_b) is TORCHS


@pytest.mark.usefixtures("native")
def test_torch_keeps_vectors() -> None:
    assert told(planned("gemm_all_reduce", 1, 64, 64, 2)) is TORCHS
    assert told(planned("gemm_all_reduce", 2, 64, 64, 2)) is not TORCHS


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def fewer_multiprocessors() -> Iterator[None]:
    torch._C._set_sm_carveout_experimental(8)
    yield
    torch._C._set_sm_carveout_experimental(None)


def flipped(name: str) -> Callable[[], AbstractContextManager[None]]:
    """One of torch.backends.cuda.matmul, each True or False."""

    @contextmanager
    def flip() -> Iterator[None]:
        usually = getattr(torch.backends.cuda.matmul, name)
        setattr(torch.backends.cuda.matmul, name, not usually)
        yield
        setattr(torch.backends.cuda.matmul, name, usually)

    return flip


def answering(name: str, value: object) -> Callable[[], AbstractContextManager[None]]:
    """A function of torch's that a torch without CUDA does not have, or whose answer it does not let be
    changed."""

    @contextmanager
    def flip() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch._C, name, lambda: value, raising=False)
            yield

    return flip


BOTH = {"bfloat16", "float16"}
FLIPS: dict[str, tuple[Callable[[], AbstractContextManager[None]], set[str]]] = {
    "deterministic": (deterministic, BOTH),
    "fewer multiprocessors": (fewer_multiprocessors, BOTH),
    "another library": (
        answering("_get_blas_preferred_backend", torch._C._BlasBackend.Cublaslt),
        BOTH,
    ),
    "tuned": (answering("_cuda_tunableop_is_enabled", True), BOTH),
    "bfloat16 sums": (flipped("allow_bf16_reduced_precision_reduction"), {"bfloat16"}),
    "float16 sums": (flipped("allow_fp16_reduced_precision_reduction"), {"float16"}),
    "float16 terms": (flipped("allow_fp16_accumulation"), {"float16"}),
}


def unusual() -> set[str]:
    """The dtypes whose products torch does not make as usual, found as native code asks."""
    dtypes: tuple[DtypeName, ...] = ("bfloat16", "float16")
    return {
        dtype
        for dtype in dtypes
        if not all(function() == value for function, value in switches(dtype))
    }


@pytest.mark.parametrize("name", FLIPS)
def test_every_switch_of_torchs_is_seen(name: str) -> None:
    flip, of = FLIPS[name]
    assert unusual() == set()
    with flip():
        assert unusual() == of
    assert unusual() == set()


class OpenedFabric(Fabric):
    """Of a process that has loaded cuBLAS."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.opened: list[tuple[int, str, Any]] = []

    def open_cublas(self, device: int, library: str, allocate: Any, workspace: int) -> Any:
        assert workspace == WORKSPACE_BYTES
        self.opened.append((device, library, allocate))
        return "opened"

    def cublas_product(self, *how: Any) -> dict[str, Any]:
        return cublas_product(*how)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> OpenedFabric:
    """Of a world of two, with a torch for CUDA 13."""
    made = OpenedFabric(2)
    for module in (library, device_world, cublas, norm, starters):
        monkeypatch.setattr(module, "native", lambda: made)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return made


def executor(plan: LaunchPlan, shared: DispatchContext) -> LibraryExecutor:
    world = plan.world_size
    call = Call(
        plan=plan, rank=0, tensors={}, epoch=1, number=1, pad=0, workspace=workspace_of(0),
        areas=(0,), peers={p: PeerMemory(0, workspace_of(p)) for p in range(1, world)},
        region=0, fifo=0, timeout_s=1.0,
    )  # fmt: skip
    return LibraryExecutor(call, shared)


def test_a_world_opens_it_once_before_its_first_call(opened: OpenedFabric) -> None:
    shared = context(None)
    for op in OPS:
        plan = planned(op, 4096, 1024, 264, 2)
        product: Any = executor(plan, shared).starter({}, packed(plan))
        assert product["world"] == "opened"
    ((device, name, allocate),) = opened.opened
    assert (device, name) == (0, "libcublas.so.13")
    assert allocate.args == (WORKSPACE_BYTES + ROOM_BYTES, 0)


@pytest.mark.parametrize("short", [False, True])
def test_its_memory_is_the_devices_not_torchs(
    opened: OpenedFabric, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    """Torch's may be of the pool of a CUDA graph that its compiler warms up. ``short``: torch has kept
    what the device lacks."""
    freed: list[bool] = []

    class Memory:
        def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            assert offset == 0
            return torch.zeros(shape, dtype=dtype)

        @classmethod
        def create(cls, nbytes: int, device: int) -> Memory:
            assert (nbytes, device) == (WORKSPACE_BYTES + ROOM_BYTES, 0)
            if short and not freed:
                raise OSError("no memory")
            return cls()

    monkeypatch.setattr(cublas, "DeviceMemory", Memory)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    monkeypatch.setattr(torch, "empty", None)
    executor(planned("gemm_all_reduce", 4096, 1024, 264, 2), context(None))
    ((_, _, allocate),) = opened.opened
    assert allocate().nbytes == WORKSPACE_BYTES + ROOM_BYTES
    assert freed == [True] * short


def test_nothing_is_opened_that_nobody_uses(
    opened: OpenedFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = context(None)
    with monkeypatch.context() as patch:
        patch.setattr(cublas, "_capturing", lambda: True)
        executor(planned("gemm_all_reduce", 64, 64, 64, 2), shared)
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", None)
        executor(planned("gemm_all_reduce", 64, 64, 64, 2), shared)
    opened.world = 1
    executor(planned("gemm_all_reduce", 64, 64, 64, 1), shared)
    assert opened.opened == []


def test_results_that_are_rounded_behind_the_product_are_torchs(opened: OpenedFabric) -> None:
    plan = planned("all_gather_gemm", 16, 8, 64, 2)
    assert plan.part(ProductSchedule).product == "float32"
    product: Any = executor(plan, context(None)).starter({}, packed(plan))
    assert "world" not in product
    assert product["whole"] is not None


@every_op
def test_products_in_parts(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    stands: Any = fabrics(monkeypatch)(2)
    stands.cublas_product = cublas_product
    monkeypatch.setattr(cublas, "native", lambda: stands)
    plan = in_parts(op, 512, 136, 264, 2, 2)
    for shared, ours in ((context(), True), (context(None), False)):
        made: Any = executor_of(plan)(call_of(plan, stands, 0, {}), shared)
        product = made.starter({}, packed(plan)).how["product"]
        assert ("world" in product) == ours
        if ours:
            assert (product["a"], product["b"]) == ((False, 264), (False, 136))
