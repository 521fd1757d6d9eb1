"""The plan of a call is that of ``mkernel.plan``; MKERNEL_PATH and a call choose its path."""

from __future__ import annotations

import os

import pytest
import torch

import mkernel
from mkernel.cases import case_of
from mkernel.errors import PlanMismatch, Unsupported
from mkernel.harness.contenders.own import MkernelFused, MkernelLibrary
from mkernel.harness.problem import Problem
from mkernel.ops import all_gather_gemm
from mkernel.ops.gemm import GemmCall
from mkernel.ops.gemm_all_reduce import OP

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

BACKEND = "limited_backends:TwoPaths"
M, N, K = 16, 24, 8


def problem(op: str) -> Problem:
    world = mkernel.world()
    case = case_of(op)({"m": M, "n": N, "k": K}, "float32", "float32")
    return Problem(case, world.rank, world.size, torch.device("cpu"))


def launched() -> list[str]:
    paths: list[str] = mkernel.world().accelerator.paths  # type: ignore[attr-defined]
    return paths


def calls() -> list[str]:
    """The paths of the public op and of both contenders, and what the plan says first."""
    a, b = torch.ones(M, K), torch.ones(K, N)
    planned = mkernel.plan("gemm_all_reduce", m=M, n=N, k=K, dtype="float32").path
    size = mkernel.world().size
    out = torch.empty(M, N)
    mkernel.gemm_all_reduce(a, b, out=out)
    for kind in (MkernelFused, MkernelLibrary):
        assert kind.unusable(problem("gemm_all_reduce")) is None
        out.zero_()
        kind(problem("gemm_all_reduce")).call({"a": a, "b": b}, {"out": out})
        assert torch.equal(out, torch.full((M, N), float(size * K)))
    assert MkernelLibrary.unusable(problem("all_gather_gemm")) is not None
    return [planned, *launched()]


@pytest.mark.parametrize(("wanted", "taken"), [("auto", "fused"), ("library", "library")])
def test_the_setting_and_the_call_choose(
    monkeypatch: pytest.MonkeyPatch, wanted: str, taken: str
) -> None:
    monkeypatch.setenv("MKERNEL_PATH", wanted)
    results = mkernel.launch(calls, ranks_per_node=2, accelerator=BACKEND)
    assert results == [[taken, taken, "fused", "library"]] * 2


def plan_is_the_launched_one() -> bool:
    size = mkernel.world().size
    a, b, out = torch.ones(64, 32), torch.ones(32, 24), torch.empty(64 * size, 24)
    launched = all_gather_gemm.OP.call(GemmCall(a, b, out=out)).plan
    asked = mkernel.plan("ag_gemm", m=64 * size, n=24, k=32, dtype="float32")
    return launched == asked and launched.digest() == asked.digest()


def test_plan_is_what_the_launch_uses() -> None:
    assert all(
        mkernel.launch(plan_is_the_launched_one, nodes=2, ranks_per_node=2, accelerator="ascend")
    )


def differ() -> str:
    path = "library" if mkernel.world().rank == 1 else "fused"
    with pytest.raises(PlanMismatch) as raised:
        OP.call(GemmCall(torch.ones(M, K), torch.ones(K, N), path=path))  # type: ignore[arg-type]
    assert launched() == []
    return str(raised.value)


def test_ranks_on_other_paths_are_told_before_anything_starts() -> None:
    for message in mkernel.launch(differ, ranks_per_node=2, accelerator=BACKEND):
        assert "path" in message
        assert "library" in message


def refused() -> str:
    assert os.environ["MKERNEL_PATH"] == "library"
    with pytest.raises(Unsupported) as raised:
        mkernel.all_gather_gemm(torch.ones(M, K), torch.ones(K, N))
    return str(raised.value)


def test_an_op_without_a_library_path_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_PATH", "library")
    for message in mkernel.launch(refused, ranks_per_node=2, accelerator=BACKEND):
        assert "no library path for 'all_gather_gemm'; set MKERNEL_PATH" in message
