"""A tensor to prefetch is a hint: results have the same bits, it is neither written, saved nor
differentiated, and a call with another tensor of its kind is a known one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from python_calls import plans
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.library import opcheck
from torch.nn import Parameter

import mkernel
from mkernel.backends.contracts.instrumented import LaunchTimes
from mkernel.errors import ArgumentError, DtypeError, LayoutError
from mkernel.nn import RowParallelLinear
from mkernel.ops.registration import ops
from mkernel.world.agreement import Agreement
from mkernel.world.calls import CallRecord
from mkernel.world.world import World

E4M3 = torch.float8_e4m3fn
SCALED = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


X, B, NORM, RESIDUAL = drawn(4, 32), drawn(32, 32), drawn(32), drawn(4, 32)
LEFT, RIGHT, ONE = drawn(4, 128).to(E4M3), drawn(32, 128).to(E4M3).t(), torch.ones(1)
CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": partial(mkernel.all_reduce, X),
    "all_reduce, into": lambda **more: mkernel.all_reduce(
        X, out=torch.full((4, 32), torch.nan), **more
    ),
    "all_reduce, normalised": partial(
        mkernel.all_reduce, X, norm_weight=NORM, residual=RESIDUAL
    ),
    "all_reduce, quantised": partial(mkernel.all_reduce, X, norm_weight=NORM, quantise="row"),
    "gemm_all_reduce": partial(mkernel.gemm_all_reduce, X, B, bias=NORM),
    "gemm_all_reduce, into": lambda **more: mkernel.gemm_all_reduce(
        X, B, out=torch.full((4, 32), torch.nan), **more
    ),
    "gemm_all_reduce, normalised": partial(
        mkernel.gemm_all_reduce, X, B, norm_weight=NORM, residual=RESIDUAL
    ),
    "gemm_all_reduce, normalised into": lambda **more: mkernel.gemm_all_reduce(
        X, B, norm_weight=NORM, out=torch.full((4, 32), torch.nan), **more
    ),
}  # fmt: skip
if SCALED:
    CALLS["gemm_all_reduce, scaled"] = partial(
        mkernel.gemm_all_reduce, LEFT, RIGHT, a_scale=ONE, b_scale=ONE
    )
WEIGHTS: dict[str, Callable[[], Tensor]] = {
    "a matrix": lambda: drawn(64, 48),
    "its transpose": lambda: drawn(64, 48).t(),
    "some of its rows": lambda: drawn(64, 48)[3:17],
    "e4m3": lambda: drawn(64, 48).to(E4M3),
    "one byte": lambda: torch.ones((), dtype=torch.uint8),
    "an odd address": lambda: torch.zeros(77, dtype=torch.uint8)[1:],
    "several dimensions": lambda: drawn(2, 3, 4, 5).permute(2, 0, 3, 1),
    "nothing": lambda: torch.empty(0, 8),
    "the operand": lambda: X,
    "a parameter": lambda: Parameter(drawn(64, 48)),
}


def same(found: Any, wanted: Any) -> None:
    one, other = ([each] if isinstance(each, Tensor) else [*each] for each in (found, wanted))
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        bits = [each.contiguous().flatten().view(torch.uint8) for each in (a, b)]
        assert torch.equal(*bits)


@pytest.mark.parametrize("call", CALLS)
def test_results_are_the_same_with_every_tensor(call: str) -> None:
    wanted = CALLS[call]()
    for make in WEIGHTS.values():
        weight = make()
        before, version = weight.detach().clone(), weight._version
        for _ in range(2):  # the second one is known
            found = CALLS[call](prefetch=weight)
            same(found, wanted)
            assert not any(
                each.requires_grad for each in (found if type(found) is tuple else [found])
            )
        same(weight.detach(), before)
        assert weight._version == version


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("weight", "error", "said"),
    [
        (lambda: torch.zeros(8, 8, device="meta"), ArgumentError, "prefetch.device = meta"),
        (lambda: drawn(8, 8)[:, :4], LayoutError, "prefetch = .*without gaps"),
        (lambda: drawn(1, 8).expand(8, 8), LayoutError, "prefetch = .*without gaps"),
        (lambda: drawn(8, 8).to_sparse(), ArgumentError, "prefetch = a torch.sparse_coo tensor"),
        (lambda: "weight", DtypeError, "prefetch = .*a torch.Tensor"),
    ],
    ids=["device", "gaps", "repeated", "sparse", "no tensor"],
)
def test_what_is_wrong_is_refused_by_name(
    call: str, weight: Callable[[], Any], error: type[ArgumentError], said: str
) -> None:
    CALLS[call](prefetch=drawn(8, 8))
    with pytest.raises(error, match=said):
        CALLS[call](prefetch=weight())


@pytest.mark.parametrize("claimed", [True, False])
def test_a_launch_gets_it_where_the_backend_claims_it(
    claimed: bool, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = alone.accelerator.capabilities()
    assert claims.prefetch_ops == ()
    if claimed:
        claims = claims.model_copy(update={"prefetch_ops": ("all_reduce", "gemm_all_reduce")})
    monkeypatch.setattr(alone.accelerator, "capabilities", lambda: claims)
    plans_of: list[Any] = []
    launched: list[Tensor | None] = []

    def run(plan: Any, tensors: dict[str, Tensor], **_: Any) -> CallRecord:
        plans_of.append(plan)
        launched.append(tensors.get("prefetch"))
        return CallRecord(LaunchTimes(), None, {})

    monkeypatch.setattr(alone, "run", run)
    weight, width = drawn(64, 48).t(), 40 if claimed else 48  # of calls that no other test makes
    x, square, norm = drawn(4, width), drawn(width, width), drawn(width)
    for call in (
        partial(mkernel.all_reduce, x),
        partial(mkernel.all_reduce, x, norm_weight=norm),
        partial(mkernel.gemm_all_reduce, x, square),
        partial(mkernel.gemm_all_reduce, x, square, norm_weight=norm),
        partial(mkernel.gemm_all_reduce, x, square, out=torch.empty(4, width)),
    ):
        call()
        call(prefetch=weight)
        assert plans_of[-1] == plans_of[-2]
        assert launched[-2] is None
        assert launched[-1] is (weight if claimed else None)


def test_ranks_need_not_prefetch_the_same(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symmetric memory, of which other tensors lie at one place on all ranks, is none of its."""
    claims = alone.accelerator.capabilities().model_copy(update={"prefetch_ops": ("all_reduce",)})
    monkeypatch.setattr(alone.accelerator, "capabilities", lambda: claims)
    enter, agreed = Agreement.enter, []

    def noted(self: Agreement, plan: Any, tensors: dict[str, Tensor], places: Any) -> int:
        agreed.append((set(tensors), set(places)))
        return enter(self, plan, tensors, places)

    monkeypatch.setattr(Agreement, "enter", noted)
    x, weight = (mkernel.empty(shape, torch.float32).fill_(1) for shape in ((4, 56), (8, 8)))
    assert torch.equal(mkernel.all_reduce(x, prefetch=weight), torch.ones(4, 56))
    assert agreed == [({"x", "out", "prefetch"}, {"x"})]


@pytest.mark.parametrize("call", CALLS)
def test_another_weight_of_its_shape_is_a_known_call(call: str, alone: World) -> None:
    weights = [drawn(64, 48) + number for number in range(4)]
    alone.path.forget()
    with plans(of_all=False) as planned:
        for weight in weights:
            CALLS[call](prefetch=weight)
    assert len(planned) == 1
    with plans(of_all=False) as planned:
        CALLS[call](prefetch=drawn(48, 64))
        CALLS[call]()
    assert len(planned) == 2


def test_no_gradient_flows_to_it() -> None:
    weight, x, b = Parameter(drawn(64, 48)), X.clone().requires_grad_(), B.clone().requires_grad_()
    for call, leaves in (
        (lambda **more: mkernel.all_reduce(x, **more), [x]),
        (lambda **more: mkernel.all_reduce(x, norm_weight=NORM, **more)[0], [x]),
        (lambda **more: mkernel.gemm_all_reduce(x, b, **more), [x, b]),
        (lambda **more: mkernel.gemm_all_reduce(x, b, norm_weight=NORM, **more)[0], [x, b]),
    ):
        kept: list[Tensor] = []

        def keep(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        wanted = torch.autograd.grad(call().square().sum(), leaves)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = call(prefetch=weight)
        assert all(each.data_ptr() != weight.data_ptr() for each in kept)
        same(torch.autograd.grad(found.square().sum(), leaves), wanted)
    assert weight.grad is None


def test_a_registered_op_gives_it_none(alone: World) -> None:
    weight, x = Parameter(drawn(64, 48)), X.clone().requires_grad_()
    found = torch.ops.mkernel.all_reduce(x, prefetch=weight, group=alone.name)
    of_x, of_weight = torch.autograd.grad(found.sum(), [x, weight], allow_unused=True)
    assert torch.equal(of_x, torch.ones(4, 32))
    assert of_weight is None


@pytest.mark.parametrize(
    ("op", "given"),
    [
        ("all_reduce", [X]),
        ("all_reduce_norm", [X, NORM]),
        ("gemm_all_reduce", [X, B]),
        ("gemm_all_reduce_norm", [X, B, NORM]),
        ("all_reduce_norm_quantised", [X, NORM]),
        ("gemm_all_reduce_norm_quantised", [X, B, NORM]),
        ("gemm_all_reduce_scaled", [LEFT, RIGHT, ONE, ONE]),
    ],
)
def test_torch_knows_it(op: str, given: list[Tensor], alone: World) -> None:
    if "scaled" in op and not SCALED:
        pytest.skip("this torch multiplies no e4m3 on CPUs")
    options = {"prefetch": drawn(64, 48), "group": alone.name}
    tests = ("test_autograd_registration", "test_faketensor")
    if "scaled" not in op:  # which torch cannot check in e4m3
        tests = ("test_schema", *tests)
    opcheck(getattr(torch.ops.mkernel, op).default, given, options, test_utils=tests)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) for each in given]
        options["prefetch"] = mode.from_tensor(options["prefetch"])
        fake = getattr(torch.ops.mkernel, op)(*fakes, **options)
    real = getattr(ops, op)(*given, prefetch=drawn(64, 48))
    pairs = zip(
        *([each] if isinstance(each, Tensor) else each for each in (fake, real)), strict=True
    )
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    weight, x = Parameter(drawn(64, 48)), X.clone().requires_grad_()

    def layer(x: Tensor, prefetch: Tensor | None) -> Tensor:
        rows, residual = mkernel.all_reduce(
            x * 2, norm_weight=NORM, residual=RESIDUAL, prefetch=prefetch
        )
        return mkernel.gemm_all_reduce(rows, B, prefetch=prefetch) + residual

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), layer(x, None))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, weight), layer(x, None))
    found, wanted = (
        torch.autograd.grad(function(x, given).sum(), [x, weight], allow_unused=True)
        for function, given in ((compiled, weight), (layer, None))
    )
    torch.testing.assert_close(found[0], wanted[0])
    assert found[1] is None


def test_of_a_dtensor_this_ranks_part_is_prefetched() -> None:
    mkernel.all_reduce(X)  # the first call makes torch's default group
    weight = DTensor.from_local(drawn(64, 48), DeviceMesh("cpu", [0]), [Shard(0)])
    for call in CALLS.values():
        same(call(prefetch=weight), call())


def test_a_row_parallel_layer_takes_it() -> None:
    layer = RowParallelLinear(32, 32, sequence_parallel=False)
    with torch.no_grad():
        same(layer(X, prefetch=drawn(64, 48)), layer(X))
        with pytest.raises(DtypeError, match="prefetch = "):
            layer(X, prefetch="weight")
        split = RowParallelLinear(32, 32)
        same(split(X, prefetch=drawn(64, 48)), split(X))
