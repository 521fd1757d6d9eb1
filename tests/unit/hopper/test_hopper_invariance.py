"""Plans of invariant results on ``hopper`` and ``cuda``, and the segments of a reduction, by native
functions that stand for the kernels."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_plans import gpu_plan
from library_fabric import STREAM, Fabric, Told, bytes_at, workspace_of

from mkernel import Invariant
from mkernel.backends.accelerators.cuda import device_world
from mkernel.backends.accelerators.cuda.backend import CudaAccelerator
from mkernel.backends.accelerators.cuda.capabilities import MOE
from mkernel.backends.accelerators.cuda.device_world import DispatchContext
from mkernel.backends.accelerators.cuda.moe.grouped import (
    LibraryCombineExecutor,
    LibraryDispatchExecutor,
)
from mkernel.backends.accelerators.cuda.schedule import SumSchedule
from mkernel.backends.accelerators.hopper.backend import HopperAccelerator
from mkernel.backends.accelerators.hopper.dispatch import executor_of
from mkernel.backends.accelerators.hopper.gemm import fused, segments
from mkernel.backends.accelerators.hopper.gemm.tuning import LEVELS
from mkernel.backends.accelerators.hopper.schedule import (
    AttentionKernelSchedule,
    GatherSchedule,
    SegmentsSchedule,
)
from mkernel.backends.contracts.accelerator import Call
from mkernel.backends.contracts.memory import PeerMemory
from mkernel.backends.contracts.tree import tree_sum
from mkernel.errors import Unsupported
from mkernel.plan.arguments import Around
from mkernel.plan.model import E4M3, LaunchPlan, Scales
from mkernel.plan.shapes import size_names

HOPPER, CUDA = HopperAccelerator(), CudaAccelerator()
GEMM = {"n": 1024, "k": 4096}
ROWS = (8, 16, 64, 128, 1024, 65536)


def planned(op: str, world: int, m: int, backend: Any = HOPPER, **more: Any) -> LaunchPlan:
    scales, path = more.pop("scales", None), more.pop("path", "auto")
    sizes = {"m": m, "n": 1024} if op == "all_reduce" else {"m": m, **GEMM}
    around = Around(invariant=more.pop("how", Invariant()), scales=scales)
    options = {"dtype": "bfloat16"}
    if scales is not None:
        options = {"dtype": E4M3, "out_dtype": "bfloat16", "b_layout": "column"}
    return gpu_plan(backend, op, world, sizes, around=around, path=path, **options)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"])
def test_products_are_fused_with_tilings_that_add_alike(op: str, world: int) -> None:
    kind = GatherSchedule if op == "all_gather_gemm" else SegmentsSchedule
    plans = [planned(op, world, m) for m in ROWS]
    assert {plan.path for plan in plans} == {"fused"}
    assert "narrow" in {plan.part(kind).tiling for plan in plans} <= {"wide", "medium", "narrow"}


def test_few_segments_of_a_rank_are_added_in_registers() -> None:
    def levels(world: int, m: int, **how: Any) -> int:
        return planned("gemm_all_reduce", world, m, **how).part(SegmentsSchedule).levels

    assert [levels(world, 4096) for world in (4, 8)] == [1, 0]
    assert {levels(2, m) for m in (4096, 65536)} <= {1, 2}
    assert {levels(2, m, scales=Scales(mode="row", use_fast_accum=True)) for m in ROWS} == {0}


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_reduce_scatter"])
def test_promoted_sums_have_a_tiling_of_their_own(op: str, fast: bool) -> None:
    scales = Scales(mode="row", use_fast_accum=fast)
    kind = GatherSchedule if op == "all_gather_gemm" else SegmentsSchedule
    found = {planned(op, 2, m, scales=scales).part(kind).tiling for m in ROWS}
    assert ("promoted" not in found) if fast else (found == {"promoted"})
    with pytest.raises(Unsupported, match="not by 'block'"):
        planned(op, 2, 64, scales=Scales(mode="block"))


@pytest.mark.parametrize("backend", [HOPPER, CUDA], ids=["hopper", "cuda"])
def test_more_than_two_terms_never_go_by_two_exchanges_of_mail(backend: Any) -> None:
    ways = {
        (world, planned("all_reduce", world, m, backend).part(SumSchedule).way)
        for world in (2, 4, 8)
        for m in range(16, 8192, 64)
    }
    assert (2, "mail_twice") in ways
    assert not {(4, "mail_twice"), (8, "mail_twice")} & ways


def test_experts_are_multiplied_by_own_kernels_alone() -> None:
    sizes = {"tokens": 64, "hidden": 256, "features": 256, "experts": 8, "top_k": 2}
    for op in MOE:
        given = {name: sizes[name] for name in size_names(op)}
        plan = gpu_plan(
            HOPPER, op, 2, given, dtype="bfloat16", around=Around(invariant=Invariant())
        )
        assert executor_of(plan) not in (LibraryDispatchExecutor, LibraryCombineExecutor)
        if "gemm" in op:
            with pytest.raises(Unsupported, match=f"'cuda' does not promise .* '{op}'"):
                gpu_plan(CUDA, op, 2, given, dtype="bfloat16", around=Around(invariant=Invariant()))


def test_what_is_not_promised_is_refused_by_name() -> None:
    with pytest.raises(
        Unsupported, match=r"'cuda' does not promise .* 'gemm_all_reduce'.*: all_reduce"
    ):
        planned("gemm_all_reduce", 2, 64, CUDA)
    with pytest.raises(Unsupported, match="no library path for 'all_gather_gemm' with invariant"):
        planned("all_gather_gemm", 2, 64, path="library")
    plan = planned("gemm_all_reduce", 2, 64, how=Invariant(8, "float32"))
    with pytest.raises(Unsupported, match="partial_dtype is float32"):
        HOPPER.workspace(plan)


@pytest.fixture(autouse=True)
def no_way_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_HOPPER_ATTENTION", "auto")


def attention(world: int, **changes: Any) -> LaunchPlan:
    sizes = {
        "batch": 1,
        "heads": 8,
        "kv_heads": 2,
        "sequence": 4096,
        "head_dim": 64,
        "causal": True,
    }
    around = Around(invariant=Invariant())
    return gpu_plan(
        HOPPER, "ring_attention", world, sizes | changes, around=around, dtype="bfloat16"
    )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_attention_is_the_one_kernel(world: int, head_dim: int) -> None:
    assert attention(world, head_dim=head_dim).part(AttentionKernelSchedule)
    assert attention(1, sequence=1024 - 32 * world).part(AttentionKernelSchedule)


@pytest.mark.parametrize(
    "changes", [{"sequence": 4096 - 128}, {"head_dim": 256}, {"documents": True}], ids=str
)
def test_attention_that_has_no_order_of_its_own_is_refused(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unsupported, match="with invariant results on 'hopper' takes heads of 64"):
        attention(2, **changes)
    monkeypatch.setenv("MKERNEL_HOPPER_ATTENTION", "parts")
    with pytest.raises(Unsupported, match="MKERNEL_HOPPER_ATTENTION = 'parts'"):
        attention(2)


class SegmentsFabric(Fabric):
    """Products, sums of parts and collectives by the tree."""

    Tiling = SimpleNamespace(**{name: name for name in ("wide", "medium", "narrow", "promoted")})
    Scaling = SimpleNamespace(none="none", single="single", by_rows="by_rows")

    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.launches: list[tuple[int, int]] = []

    def DeviceWorld(self, workspaces: list[int], *how: Any) -> int:
        return how[0] if len(workspaces) == self.world else -1

    def Collective(self, rank: int, staging_bytes: int, **how: Any) -> Told:
        assert how.pop("tree")
        assert not how.pop("blocks")
        return Told(rank, staging_bytes, **how)

    def AllGatherSchedule(
        self, rows: int, chunk: int, segments: int, levels: int
    ) -> tuple[int, int, int]:
        assert rows == chunk
        return rows, segments, levels

    def Product(self, **sizes: Any) -> Any:
        return SimpleNamespace(of=lambda tensors: SimpleNamespace(tensors=tensors, **sizes))

    def GemmTensors(self, a: int, b: int, out: int, bias: int, **more: int) -> Any:
        return SimpleNamespace(a=a, b=b, out=out, bias=bias, **more)

    def all_gather_gemm(
        self, device: int, world: int, product: Any, rows: tuple[int, int, int], waits: bool,
        stream: int,
    ) -> None:  # fmt: skip
        assert (world == -1 or self.world == 1, waits, stream) == (True, False, STREAM)
        t, (m, roots, levels), n, k = product.tensors, rows, product.n, product.k
        parts = roots << levels
        assert parts == 1 or k % (64 * parts) == 0
        assert levels in (0, LEVELS[product.tiling])
        self.launches.append((roots, levels))
        a = matrix(t.a, m, k, t.a_pitch or k)
        b = matrix(t.b, k, n, t.b_pitch) if product.n_major else matrix(t.b, n, k, t.b_pitch).t()
        each = zip(a.float().chunk(parts, 1), b.float().chunk(parts), strict=True)
        leaves = [(one @ other).bfloat16() for one, other in each]
        groups = [leaves[at : at + (1 << levels)] for at in range(0, parts, 1 << levels)]
        found = torch.stack([tree_sum(group) for group in groups])
        if t.bias:
            found = (found.float() + matrix(t.bias, 1, n, n).float()).bfloat16()
        ctypes.memmove(t.out, found.data_ptr(), found.nbytes)

    def sum_parts(
        self, device: int, world: int, element: Any, parts: list[int], elements: int, out: int,
        blocks: int, ends: bool, stream: int, bias: int, columns: int, tree: bool,
    ) -> None:  # fmt: skip
        assert (tree, ends, blocks > 0, len(parts) <= 16) == (True, False, True, True)
        total = self._added([bytes_at(at, 2 * elements) for at in parts], bias, columns)
        ctypes.memmove(out, total.data_ptr(), total.nbytes)

    def _sum(
        self, rank: int, element: Any, src: int, elements: int, bias: int, columns: int
    ) -> torch.Tensor:
        return self._added(self._exchange(rank, bytes_at(src, 2 * elements)), bias, columns)

    @staticmethod
    def _added(parts: list[bytes], bias: int, columns: int) -> torch.Tensor:
        terms = [torch.frombuffer(bytearray(one), dtype=torch.bfloat16) for one in parts]
        total = tree_sum(terms).view(-1, columns)
        if bias:
            total = (total.float() + matrix(bias, 1, columns, columns).float()).bfloat16()
        return total.flatten().contiguous()


def matrix(at: int, rows: int, columns: int, pitch: int) -> torch.Tensor:
    """A matrix in memory."""
    nbytes = 2 * ((rows - 1) * pitch + columns)
    flat = torch.frombuffer(bytearray(bytes_at(at, nbytes)), dtype=torch.bfloat16)
    return flat.as_strided((rows, columns), (pitch, 1))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("levels", [0, 1, 2])
@pytest.mark.parametrize("count", [4, 8, 64])
@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_all_reduce"])
def test_segments_are_added_by_the_tree(
    op: str, count: int, world: int, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levels in registers and the kernel behind add as one tree does, with as many levels as fit."""
    fabric = SegmentsFabric(world)
    for module in (segments, fused, device_world):
        monkeypatch.setattr(module, "native", lambda: fabric)
    m, n, k = 8, 16, 2048
    random = torch.Generator().manual_seed(count)
    a, b = (torch.randint(-32, 33, size, generator=random).bfloat16() for size in ((m, k), (k, n)))
    bias = torch.randn(n, generator=random).bfloat16()
    sizes = {"m": m, "n": n, "k": k // world}
    scatters = op == "gemm_reduce_scatter"
    made = gpu_plan(
        HOPPER,
        op,
        world,
        sizes,
        dtype="bfloat16",
        around=Around(bias=True, invariant=Invariant(count)),
    )
    assert executor_of(made) is segments.SegmentsExecutor
    whole = k // count % 64 == 0
    levels = min(levels, (count // world).bit_length() - 1) if whole else 0
    tile = next((name for name, most in LEVELS.items() if most == levels), "wide")
    how = made.part(SegmentsSchedule).model_copy(update={"levels": levels, "tiling": tile})
    made = made.model_copy(update={"schedule": how})
    outs = [
        torch.full((m // world if scatters else m, n), torch.nan).bfloat16() for _ in range(world)
    ]

    def start(rank: int) -> None:
        own = slice(rank * k // world, (rank + 1) * k // world)
        tensors = {"a": a[:, own].contiguous(), "b": b[own], "bias": bias, "out": outs[rank]}
        call = Call(
            plan=made, rank=rank, tensors=tensors, epoch=1, number=1, pad=0,
            workspace=workspace_of(rank), areas=(0,),
            peers={
                other: PeerMemory(0, workspace_of(other)) for other in range(world) if other != rank
            },
            region=0, fifo=0, timeout_s=1.0, view="pipelined", symmetric={},
        )  # fmt: skip
        order: Any = None
        segments.SegmentsExecutor(call, DispatchContext(0, order, 64)).start(call, STREAM)

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(start, range(world)))
    step = k // count
    leaves = [
        (a[:, at : at + step].float() @ b[at : at + step].float()).bfloat16()
        for at in range(0, k, step)
    ]
    expected = (tree_sum(leaves).float() + bias.float()).bfloat16()
    found = torch.cat(outs) if scatters else outs[0]
    assert torch.equal(found, expected)
    each = count // world >> levels if whole else 1
    assert fabric.launches == [(each, levels)] * ((count >> levels) // each)
    assert all(torch.equal(each, outs[0]) for each in outs) or scatters
