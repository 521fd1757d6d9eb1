"""What torch's compilers are told of every op: fake kernels give the shapes, dtypes and strides of real
outputs, schemas say what is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import mkernel
from mkernel.errors import ArgumentError, ShapeError
from mkernel.ops import (
    all_reduce,
    checkpointing,
    gemm_all_reduce,
    inductor,
    moe_gemm_combine,
    registration,
    replicated,
    ring_attention,
)

E4M3 = torch.float8_e4m3fn
TESTS = ("test_schema", "test_autograd_registration", "test_faketensor")
IDS = torch.tensor([[0, 1], [1, -1], [0, 0]])


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


A, B, C, BIAS = drawn(2, 6, 16), drawn(16, 8), drawn(16, 24), drawn(8)
LEFT, RIGHT = drawn(16, 128, dtype=E4M3), drawn(32, 128, dtype=E4M3).t()
EXPERTS = drawn(2, 256, 128, dtype=E4M3).transpose(1, 2)
SCALES = torch.ones(2, 1, 2)
ONE, HALF = torch.ones(1), {"out_dtype": torch.float16}
Q, KV = drawn(1, 4, 6, 8), drawn(1, 2, 6, 8)
# Which register what is called by its name below.
REGISTERED = (all_reduce, gemm_all_reduce, moe_gemm_combine, replicated, ring_attention)
CALLS: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("all_gather_gemm", [A, B, BIAS], {"gather_dim": 1}),
    ("all_gather_gemm", [A[0], B], HALF),
    ("all_gather_gemm_gathered", [A, B], {"gather_dim": 1, **HALF}),
    ("all_gather_gemms", [A, [B, C], []], {"gather_dim": 1, **HALF}),
    ("all_gather_gemms", [A, [B, C], [BIAS, drawn(24)]], {"save_gathered": True}),
    ("gemm_reduce_scatter", [A, B, BIAS], {"scatter_dim": 1, **HALF}),
    ("gemm_all_reduce", [A, B, BIAS], {}),
    ("gemm_all_reduce_norm", [A, B, BIAS, drawn(2, 6, 8), BIAS], {"eps": 0.1}),
    ("all_reduce", [A.transpose(0, 1)], HALF),
    ("gemm_all_reduce_norm_quantised", [A, B, BIAS, drawn(2, 6, 8), BIAS], {"eps": 0.1}),
    ("all_reduce_norm", [A, drawn(16)], {}),
    ("all_reduce_norm_quantised", [A.transpose(0, 1), drawn(16)], {}),
    ("replicated_gemm", [A[0], B], {}),
    ("all_gather_gemm_scaled", [LEFT, RIGHT, ONE, ONE], {}),
    ("gemm_reduce_scatter_scaled", [LEFT, RIGHT, ONE, ONE], {"out_dtype": torch.float32}),
    ("gemm_all_reduce_scaled", [LEFT, RIGHT, ONE, ONE], HALF),
    ("gemm_all_reduce_norm_scaled",
     [LEFT, RIGHT, drawn(32).half(), None, None, ONE, ONE], HALF),
    ("gemm_all_reduce_norm_quantised",
     [LEFT, RIGHT, drawn(32).bfloat16(), None, None, ONE, ONE], {"use_fast_accum": True}),
    ("all_gather_gemms_scaled", [LEFT, [RIGHT, RIGHT], ONE, [ONE, ONE], []], {}),
    ("moe_dispatch", [drawn(3, 8), IDS, None, None, None], {"num_experts": 2, "capacity": 7}),
    ("moe_dispatch", [drawn(3, 256, dtype=torch.float16), IDS, None, None, None],
     {"num_experts": 2, "capacity": 7, "quantise": "block"}),
    ("moe_dispatch_gemm", [drawn(3, 8), IDS, drawn(2, 8, 6)], {"capacity": 7}),
    ("moe_dispatch_gemm", [drawn(3, 8), IDS, drawn(2, 8, 6)],
     {"capacity": 7, "activation": "silu_and_mul", **HALF}),
    ("moe_dispatch_gemm_scaled", [drawn(3, 128, dtype=torch.float16), IDS, EXPERTS, None, SCALES],
     {"capacity": 7}),
    ("moe_dispatch_gemm_scaled", [LEFT[:3], IDS, EXPERTS, torch.ones(3, 1), SCALES],
     {"capacity": 7, "activation": "silu_and_mul", "out_dtype": E4M3}),
    ("ring_attention", [Q, KV, KV], {"causal": True}),
    ("ring_attention", [Q.double(), KV.double(), KV.double()], {}),
]  # fmt: skip
SCALED = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU")


@pytest.mark.parametrize("at", range(len(CALLS)))
def test_fake_and_real_alike(at: int) -> None:
    name, given, options = CALLS[at]
    if "scaled" in name and not SCALED:
        pytest.skip("this torch multiplies no e4m3 on CPUs")
    op = getattr(torch.ops.mkernel, name).default
    # Compilers give the op its operands as they lie in the program, and copy none for another layout.
    assert registration._STRIDES in op.tags
    options = {**options, "group": mkernel.world().name}
    narrow = any(isinstance(each, Tensor) and each.dtype == E4M3 for each in given)
    tests = TESTS[1:] if narrow else TESTS  # the first multiplies e4m3 as no torch does
    opcheck(op, tuple(given), options, test_utils=tests)
    with FakeTensorMode() as mode:
        fake = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, given)
        found = torch.utils._pytree.tree_leaves(op(*fake, **options))
    real = torch.utils._pytree.tree_leaves(op(*given, **options))
    assert [described(each) for each in found] == [described(each) for each in real]


def described(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.stride()


def routed() -> mkernel.MoeHandle:
    return mkernel.moe_dispatch_gemm(drawn(3, 8), IDS, drawn(2, 8, 6)).handle


def test_what_follows_a_dispatch() -> None:
    group = {"group": mkernel.world().name}
    rows, weights, handle = drawn(5, 6), drawn(3, 2), routed()
    ops = torch.ops.mkernel
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.moe_combine.default, (rows, *handle, weights)),
        (ops.moe_gemm_combine.default, (rows, drawn(2, 6, 4), *handle, weights)),
        (ops.moe_combine_backward.default, (drawn(3, 6), rows, *handle, weights.double())),
        (ops.moe_gemm_combine_backward.default,
         (drawn(3, 4), rows, drawn(2, 6, 4), *handle, weights.double())),
    ]  # fmt: skip
    for op, given in calls:
        opcheck(op, given, group, test_utils=TESTS)
    wide = (drawn(5, 128, dtype=torch.float16), EXPERTS, *handle, weights, None, SCALES)
    # What torch checks of a schema by values, it has not in e4m3.
    opcheck(ops.moe_gemm_combine_scaled.default, wide, group, test_utils=TESTS[1:])
    opcheck(
        ops.moe_dispatch_backward.default,
        (drawn(5, 6), drawn(3, 8), drawn(2, 8, 6), *handle),
        {"top_k": 2, **group},
        test_utils=TESTS,
    )
    for name in ("moe_combine", "moe_gemm_combine"):
        op = getattr(ops, name).default
        given = next(values for one, values in calls if one is op)
        opcheck(op, given, {"out_dtype": torch.float16, **group}, test_utils=TESTS)


def test_fakes_refuse_what_ops_refuse() -> None:
    group = {"group": mkernel.world().name}
    ops = torch.ops.mkernel
    with FakeTensorMode() as mode:
        given = (A, drawn(7, 24), drawn(2, 7, 8), IDS, drawn(3, 16), drawn(1, 3, 6, 8))
        a, b, w, ids, x, k = (mode.from_tensor(each) for each in given)
        with pytest.raises(ShapeError, match="a has 16, b has 7"):
            ops.all_gather_gemm(a, b, **group)
        with pytest.raises(ArgumentError, match="scatter_dim = 2"):
            ops.gemm_reduce_scatter(a, mode.from_tensor(B), scatter_dim=2, **group)
        with pytest.raises(ArgumentError, match="gather_dim = 2"):
            ops.all_gather_gemm_gathered(a, mode.from_tensor(B), gather_dim=2, **group)
        with pytest.raises(ShapeError, match="x"):
            ops.all_reduce(mode.from_tensor(BIAS), **group)
        with pytest.raises(ShapeError, match="H = 16"):
            ops.moe_dispatch_gemm(x, ids, w, **group)
        with pytest.raises(ShapeError, match=r"^q = .*all at least 1"):
            ops.ring_attention(x, k, k, **group)
        with pytest.raises(ShapeError, match="divides q's 4"):
            ops.ring_attention(mode.from_tensor(Q), k, k, **group)


@pytest.mark.skipif(not SCALED, reason="this torch multiplies no e4m3 on CPUs")
def test_public_functions_of_e4m3_take_fakes() -> None:
    with FakeTensorMode() as mode:
        a, b, one = (mode.from_tensor(each) for each in (LEFT, RIGHT, ONE))
        found = mkernel.gemm_all_reduce(a, b, a_scale=one, b_scale=one)
    assert isinstance(found, Tensor)
    assert (tuple(found.shape), found.dtype) == ((16, 32), torch.bfloat16)


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_calls_are_the_same(grad: bool) -> None:
    """By a compiler that only takes the program apart and puts it together again."""

    def step(a: Tensor, b: Tensor, weight: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        c = mkernel.all_gather_gemm(a, b)
        normed = mkernel.gemm_all_reduce(c, b.t(), norm_weight=weight)
        with torch.no_grad():
            mkernel.gemm_reduce_scatter(a, b, out=out)
            mkernel.all_reduce(out, out=out)
        return mkernel.all_reduce(normed), c  # type: ignore[arg-type,return-value]

    a, b = drawn(4, 16).requires_grad_(grad), drawn(16, 8).requires_grad_(grad)
    weight = drawn(16)
    outs = torch.empty(4, 8), torch.empty(4, 8)
    eager = step(a, b, weight, outs[0])
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(a, b, weight, outs[1])
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(outs[1], outs[0])
    torch.testing.assert_close(outs[0], a.detach() @ b.detach())
    if grad:
        gradients = [torch.autograd.grad(found[0].sum(), (a, b)) for found in (eager, compiled)]
        torch.testing.assert_close(*gradients)


def test_who_asks_for_a_result_of_an_op_may_be_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor is told of the order of ops before it lowers one, and regions that this torch compiles
    wrongly are refused before they are."""
    asked: list[str] = []
    monkeypatch.setattr(inductor, "teach", lambda: asked.append("taught"))
    monkeypatch.setattr(checkpointing, "refuse_tagged", lambda: asked.append("looked"))
    fake = registration._asked(lambda *given, **named: asked.append(f"{given} {named}"))
    fake(1, group="x")
    assert asked == ["taught", "looked", "(1,) {'group': 'x'}"]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="it is not known of older ones")
def test_the_inductor_that_was_tried_keeps_the_order() -> None:
    """Else tests of compiled programs would be skipped (tests/torch/conftest.py)."""
    assert inductor.keeps_order()
