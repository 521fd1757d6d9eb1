"""How large a contender's error may be: the numbers themselves, and what legal arithmetic does."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mkernel.cases import case_of, compare
from mkernel.harness import contenders
from mkernel.harness.contenders import NO_ROUNDING, Contender, own, symm_mem
from mkernel.harness.contenders.library import Collective, Gemm, GlooMatmul, NcclCublas
from mkernel.harness.contenders.own import Mkernel
from mkernel.harness.contenders.symm_mem import Copy, SymmMem
from mkernel.harness.problem import Problem

OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
TIMES = {  # variances, of one rounding's, by world: 1 + (W (W + 1) / 2 - 1) / W
    1: 1.0,
    2: 2.0,
    4: 3.25,
    8: 5.375,
}


def test_each_contender_has_its_name() -> None:
    assert [contenders.named(name).name for name in contenders.NAMES] == list(contenders.NAMES)


def limit(kind: type[Contender], op: str, dtype: Any, world: int = 2) -> float:
    """A contender's, without the memory that it would allocate."""
    made: Any = object.__new__(kind)
    case = case_of(op)({"m": 64, "n": 32, "k": 48}, dtype, dtype)
    made.problem = Problem(case, 0, world, torch.device("cpu"))
    found: float = made.limits()["out"]
    return found


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("dtype", "one"), [("bfloat16", 3e-3), ("float16", 5e-4), ("float32", 1e-5)]
)
def test_limits(op: str, dtype: str, one: float) -> None:
    for name in contenders.OURS:
        assert limit(contenders.named(name), op, dtype) == one, name
    assert limit(Copy, op, dtype) == NO_ROUNDING
    assert limit(Gemm, op, dtype) == pytest.approx(one * math.sqrt(2))
    for world, times in TIMES.items():
        library = one * math.sqrt(2 if op == "all_gather_gemm" else max(2.0, times))
        for kind in (NcclCublas, GlooMatmul, SymmMem):
            assert limit(kind, op, dtype, world) == pytest.approx(library)
        moves = NO_ROUNDING if op == "all_gather_gemm" else library
        assert limit(Collective, op, dtype, world) == pytest.approx(moves)


def rounded_sum(parts: torch.Tensor, dtype: torch.dtype) -> float:
    """Error of a ring's sum over the first dimension: every part and every sum is rounded."""
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = (total.float() + part.to(dtype).float()).to(dtype)
    return compare(total, parts.double().sum(0)).error


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_legal_arithmetic_is_within_its_limit_and_not_far_below(dtype: str) -> None:
    """A limit three times as large would fail here, whatever it is computed from."""
    kind = getattr(torch, dtype)
    random = torch.Generator().manual_seed(1)
    found = {}
    for world in (1, 2, 4, 8):
        parts = torch.randn(world, 400, 500, generator=random)
        found[world] = rounded_sum(parts, kind)
    ours = limit(Mkernel, "gemm_reduce_scatter", dtype)
    assert ours / 3 < found[1] < ours  # one rounding
    split = limit(Gemm, "gemm_all_reduce", dtype)
    assert split / 3 < found[2] < split  # a product in two parts along K
    for world in (2, 4, 8):
        library = limit(NcclCublas, "gemm_reduce_scatter", dtype, world)
        assert library / 3 < found[world] < library, world


def on_gpus(op: str, monkeypatch: pytest.MonkeyPatch, m: int = 64, **options: Any) -> Problem:
    """A problem of two ranks as GPUs have it, to be asked for why nothing can take part."""
    for name, value in symm_mem.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    case = case_of(op)({"m": m, "n": 32, "k": 48}, "bfloat16", "bfloat16", options=options)
    return Problem(case, 0, 2, torch.device("cuda", 0))


@pytest.mark.parametrize("name", ["symm_mem-one-shot", "symm_mem-two-shot"])
@pytest.mark.parametrize("op", ["gemm_all_reduce", "all_reduce"])
def test_why_sums_in_symmetric_memory_take_no_part(
    name: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, found = contenders.named(name), on_gpus("gemm_all_reduce", monkeypatch)
    if op == "all_reduce":
        found = replace(found, case=case_of(op)({"m": 64, "n": 32}, "bfloat16", "bfloat16"))
    assert name in contenders.PEERS
    assert kind.unusable(found) is None
    for other in OPS[:2]:
        assert kind.unusable(on_gpus(other, monkeypatch)) == "for sums on every rank"
    assert kind.unusable(replace(found, bars_libraries="past the NIC")) == "past the NIC"
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    assert kind.unusable(found) == "needs TORCH_SYMM_MEM_DISABLE_MULTICAST=1"


def test_why_copies_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Copy.unusable(on_gpus("gemm_all_reduce", monkeypatch)) is None
    uneven = on_gpus("gemm_all_reduce", monkeypatch, m=63)
    assert Copy.unusable(uneven) == "for rows that ranks share alike"


def test_a_norm_takes_no_options_of_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    has = SimpleNamespace(library_ops=("gemm_all_reduce",), only_library_ops=())
    monkeypatch.setattr(own.mkernel, "capabilities", lambda: has)
    for name in ("mkernel-fused", "mkernel-library", "mkernel-parts", "mkernel-halves"):
        kind = contenders.named(name)
        assert kind.unusable(on_gpus("gemm_all_reduce", monkeypatch)) is None
        normed = on_gpus("gemm_all_reduce", monkeypatch, norm="residual")
        assert kind.unusable(normed) == "calls with a norm take no such option"
        other = on_gpus("all_gather_gemm", monkeypatch)
        assert kind.unusable(other) == "the accelerator has one path for this op: mkernel"


def test_limits_of_sums_with_a_norm() -> None:
    """Both results are rounded once more than the sum; their limits stay the sum's."""
    case = case_of("gemm_all_reduce")(
        {"m": 64, "n": 32, "k": 48}, "bfloat16", "bfloat16", options={"norm": "residual"}
    )
    made: Any = object.__new__(NcclCublas)
    made.problem = Problem(case, 0, 2, torch.device("cpu"))
    plain = limit(NcclCublas, "gemm_all_reduce", "bfloat16")
    assert made.limits() == {"out": plain, "residual_out": plain}


def test_why_windows_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = contenders.named("nccl-windows")
    assert "nccl-windows" in contenders.PEERS
    found = on_gpus("gemm_all_reduce", monkeypatch)
    backend = SimpleNamespace(register_mem_pool=None)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", backend, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert kind.unusable(found) is None
    assert "for GEMM ops" in str(
        kind.unusable(replace(found, case=case_of("moe_combine")({}, "bfloat16", "bfloat16")))
    )
    assert (
        kind.unusable(replace(found, bars_libraries="would go past the NIC"))
        == "would go past the NIC"
    )
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 26, 2))
    assert kind.unusable(found) == "NCCL 2.26.2 has no symmetric kernels: 2.27 or later"
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", object(), raising=False)
    assert kind.unusable(found) == "this torch registers no memory with NCCL"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")  # multicast, which these machines must not use
    assert kind.unusable(found) == "needs NCCL_NVLS_ENABLE=0"
