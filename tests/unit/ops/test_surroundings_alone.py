"""What is around a call: tensors placed on a mesh, profilers that listen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import mkernel
from mkernel.backends.contracts.instrumented import LaunchTimes
from mkernel.errors import ArgumentError
from mkernel.plan.model import LaunchPlan
from mkernel.world.calls import CallRecord
from mkernel.world.world import World


@pytest.fixture(scope="module")
def mesh() -> DeviceMesh:
    mkernel.all_reduce(torch.ones(2, 2))  # the first call makes torch's default group
    return DeviceMesh("cpu", [0])


def placed(mesh: DeviceMesh, local: Tensor, placement: Placement) -> Any:
    return DTensor.from_local(local, mesh, [placement])


def test_placed_as_the_op_takes_them(mesh: DeviceMesh) -> None:
    a, b, bias = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)
    wanted = a @ b + bias
    whole = Replicate()
    gathered = mkernel.all_gather_gemm(
        placed(mesh, a, Shard(0)), placed(mesh, b, Shard(1)), bias=placed(mesh, bias, Shard(0))
    )
    scattered = mkernel.gemm_reduce_scatter(
        placed(mesh, a, Shard(1)), placed(mesh, b, Shard(0)), bias=placed(mesh, bias, whole)
    )
    normed = mkernel.gemm_all_reduce(
        placed(mesh, a, Shard(1)), placed(mesh, b, Shard(0)),
        norm_weight=placed(mesh, bias, whole), residual=placed(mesh, wanted, whole),
    )  # fmt: skip
    assert type(gathered) is type(scattered) is Tensor
    torch.testing.assert_close(gathered, wanted)
    torch.testing.assert_close(scattered, wanted)
    torch.testing.assert_close(normed[1], a @ b + wanted)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda put, a: mkernel.all_gather_gemm(put(a, Shard(1)), a), r"a = .*Shard\(0\)"),
        (lambda put, a: mkernel.all_gather_gemm(a, put(a, Shard(0))), r"b = .*Shard\(1\)"),
        (lambda put, a: mkernel.gemm_all_reduce(put(a, Replicate()), a), r"a = .*Shard\(1\)"),
        (lambda put, a: mkernel.gemm_reduce_scatter(a, put(a, Shard(1))), r"b = .*Shard\(0\)"),
        (
            lambda put, a: mkernel.gemm_all_reduce(a, a, bias=put(a[0], Shard(0))),
            r"bias = .*Replicate\(\)",
        ),
    ],
)
def test_placed_otherwise(mesh: DeviceMesh, call: Callable[..., Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        call(lambda local, placement: placed(mesh, local, placement), torch.ones(8, 8))


def test_a_mesh_of_two_dimensions(mesh: DeviceMesh) -> None:
    a = torch.ones(8, 8)
    square = DTensor.from_local(a, DeviceMesh("cpu", [[0]]), [Shard(0), Shard(0)])
    with pytest.raises(ArgumentError, match="a 1-D mesh"):
        mkernel.all_gather_gemm(square, a)


@pytest.fixture
def launched(alone: World, monkeypatch: pytest.MonkeyPatch) -> list[tuple[LaunchPlan, set[str]]]:
    """Of a backend that adds biases and normalises by itself: the plans, and names of the tensors, that
    it was asked to launch."""
    claims = alone.accelerator.capabilities().model_copy(
        update={"adds_bias": True, "adds_norm": True, "quantises_norms": True}
    )
    monkeypatch.setattr(alone.accelerator, "capabilities", lambda: claims)
    asked: list[tuple[LaunchPlan, set[str]]] = []

    def run(plan: LaunchPlan, tensors: dict[str, Tensor], **_: Any) -> CallRecord:
        asked.append((plan, set(tensors)))
        return CallRecord(LaunchTimes(), None, {})

    monkeypatch.setattr(alone, "run", run)
    return asked


def test_what_a_launch_does_itself_it_gets(launched: list[tuple[LaunchPlan, set[str]]]) -> None:
    """And nothing is done to its results."""
    x, weight = torch.randn(6, 40), torch.randn(40)
    norm = {"norm_weight", "residual", "residual_out"}
    for call, given in (
        (lambda: mkernel.all_reduce(x, norm_weight=weight, residual=x), {"x"} | norm),
        (
            lambda: mkernel.gemm_all_reduce(x, torch.ones(40, 40), norm_weight=weight, residual=x),
            {"a", "b"} | norm,
        ),
        (
            lambda: mkernel.all_reduce(x, norm_weight=weight, residual=x, quantise="row"),
            {"x", "quantised", "quantised_scale"} | norm,
        ),
        (
            lambda: mkernel.gemm_all_reduce(
                x, torch.ones(40, 40), norm_weight=weight, residual=x, quantise="row"
            ),
            {"a", "b", "quantised", "quantised_scale"} | norm,
        ),
        (lambda: mkernel.gemm_all_reduce(x, torch.ones(40, 40), bias=weight), {"a", "b", "bias"}),
        (lambda: mkernel.gemm_all_reduce(x, torch.ones(40, 40)), {"a", "b"}),
    ):
        call()
        plan, names = launched.pop()
        assert names == given | {"out"}
        assert plan.bias == ("launch" if "bias" in given else None)
        assert (plan.norm is not None and plan.norm.step == "launch") == ("residual" in given)
        assert (plan.norm is not None and plan.norm.quantises) == ("quantised" in given)


@pytest.mark.parametrize(
    ("op", "biased"), [("all_reduce", False), ("gemm_all_reduce", False), ("gemm_all_reduce", True)]
)
def test_what_a_launch_does_not_do_the_op_does(
    op: str, biased: bool, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = alone.accelerator.capabilities().model_copy(
        update={"adds_bias": False, "adds_norm": False}
    )
    monkeypatch.setattr(alone.accelerator, "capabilities", lambda: claims)
    x, weight, bias = torch.randn(6, 56), torch.randn(56), torch.randn(56)
    operands = (x,) if op == "all_reduce" else (x, torch.eye(56))
    options = {"bias": bias} if biased else {}
    wanted = x + x + (bias if biased else 0)
    torch.testing.assert_close(getattr(mkernel, op)(*operands, **options), wanted - x)
    found, new = getattr(mkernel, op)(
        *operands, norm_weight=weight, residual=x, eps=0.25, **options
    )
    torch.testing.assert_close(new, wanted)
    scale = (wanted.square().mean(1, keepdim=True) + 0.25).rsqrt()
    torch.testing.assert_close(found, wanted * scale * weight)


def test_a_scattered_bias_is_packed_for_the_launch(
    launched: list[tuple[LaunchPlan, set[str]]],
) -> None:
    a, b, bias = torch.randn(6, 40), torch.randn(40, 24), torch.randn(48)
    for given, copied in ((bias[::2], True), (bias[:24], False)):
        mkernel.gemm_all_reduce(a, b, bias=given)
        assert ("bias" in launched.pop()[0].copies) == copied


E4M3 = torch.float8_e4m3fn
A, LEFT = torch.ones(8, 8), torch.ones(16, 16).to(E4M3)
ONE = torch.ones(1)
IDS = torch.zeros(8, 1, dtype=torch.int64)
NAMED: dict[str, list[Callable[[], Any]]] = {
    "all_gather_gemm": [
        lambda: mkernel.all_gather_gemm(A, A),
        lambda: mkernel.all_gather_gemm(A.clone().requires_grad_(), A),
    ],
    "gemm_reduce_scatter": [lambda: mkernel.gemm_reduce_scatter(A, A, out=torch.empty(8, 8))],
    "gemm_all_reduce": [
        lambda: mkernel.gemm_all_reduce(A, A),
        lambda: mkernel.gemm_all_reduce(A, A, norm_weight=A[0]),
    ],
    "all_reduce": [
        lambda: mkernel.all_reduce(A),
        lambda: mkernel.all_reduce(A.clone().requires_grad_(), norm_weight=A[0]),
    ],
    "moe_dispatch_gemm": [lambda: mkernel.moe_dispatch_gemm(A, IDS, A[None])],
    "ring_attention": [lambda: mkernel.ring_attention(*(A.view(1, 1, 8, 8),) * 3)],
}
if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU"):
    NAMED["gemm_all_reduce"].append(
        lambda: mkernel.gemm_all_reduce(LEFT, LEFT.t(), a_scale=ONE, b_scale=ONE)
    )


@pytest.mark.parametrize("op", NAMED)
def test_a_profiler_sees_each_call_once(op: str) -> None:
    for call in NAMED[op]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(2):
                call()
        seen = [event.name for event in profile.events() if event.name == f"mkernel.{op}"]
        assert len(seen) == 2


def test_options_pass_where_a_profiler_looks() -> None:
    a = torch.randn(2, 4, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        c = mkernel.all_gather_gemm(a, A, gather_dim=1, bias=A[0], out_dtype=torch.float16)
        kept = torch.empty(4, 8)
        assert mkernel.all_reduce(a[0], out=kept) is kept
    assert isinstance(c, Tensor)
    assert c.dtype == torch.float16
    torch.testing.assert_close(c.float(), a @ A + 1, rtol=1e-2, atol=1e-2)
