"""What a world launches with a plan: tensors that are the plan's, or a refusal that names one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mkernel
from mkernel.errors import ArgumentError, DtypeError, LayoutError, ShapeError
from mkernel.ops import ring_attention
from mkernel.ops.all_gather_gemm import OP
from mkernel.ops.gemm import GemmCall
from mkernel.ops.moe import dispatch
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.model import (
    AttentionShape,
    GemmCombineShape,
    GemmShape,
    LaunchPlan,
    MoeShape,
    NormStep,
    Scales,
    SumShape,
)
from mkernel.world.agreement import admit_tensors, planned_tensors


@pytest.fixture(scope="module")
def claims() -> Iterator[AcceleratorCapabilities]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        yield mkernel.init(accelerator="streams").engine("all_gather_gemm").claims
        mkernel.finalize()


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def gemm(column: bool = False) -> LaunchPlan:
    b = ones(8, 16).t() if column else ones(16, 8)
    return OP.call(GemmCall(ones(4, 16), b)).plan


Q, KV = ones(1, 4, 6, 8), ones(1, 2, 6, 8)


def attention(by_positions: bool = False, documents: bool = False) -> LaunchPlan:
    given = [x.transpose(1, 2).contiguous().transpose(1, 2) if by_positions else x for x in (Q, KV)]
    bounds = torch.tensor([0, 6], dtype=torch.int32) if documents else None
    return ring_attention.call(given[0], given[1], given[1], cu_seqlens=bounds).plan


@pytest.mark.parametrize(
    ("name", "tensor", "error"),
    [
        ("a", ones(4, 16), None),
        ("b", ones(16, 8), None),
        ("out", ones(4, 8), None),
        ("a", ones(5, 16), ShapeError),
        ("a", ones(16), ShapeError),
        ("b", ones(8, 16), ShapeError),
        ("a", ones(4, 16).half(), DtypeError),
        ("a", ones(16, 4).t(), LayoutError),
        ("out", ones(4, 16)[:, ::2], LayoutError),
        ("nothing of the plan", ones(1), None),
    ],
)
def test_tensors_of_products(
    claims: AcceleratorCapabilities, name: str, tensor: torch.Tensor, error: type[Exception] | None
) -> None:
    if error is None:
        admit_tensors(gemm(), {name: tensor}, claims)
        return
    with pytest.raises(error, match="as planned") as raised:
        admit_tensors(gemm(), {name: tensor}, claims)
    assert str(raised.value).startswith(name)


def test_b_lies_as_planned(claims: AcceleratorCapabilities) -> None:
    admit_tensors(gemm(column=True), {"b": ones(8, 16).t()}, claims)
    with pytest.raises(LayoutError, match=r"b = .*column-major and packed"):
        admit_tensors(gemm(column=True), {"b": ones(16, 8)}, claims)
    with pytest.raises(LayoutError, match=r"b = .*row-major and packed"):
        admit_tensors(gemm(), {"b": ones(8, 16).t()}, claims)


def test_attention_lies_as_planned(claims: AcceleratorCapabilities) -> None:
    lying = {False: Q, True: Q.transpose(1, 2).contiguous().transpose(1, 2)}
    for planned in (False, True):
        plan = attention(by_positions=planned)
        admit_tensors(plan, {"q": lying[planned], "lse": ones(1, 4, 6)}, claims)
        with pytest.raises(LayoutError, match=r"q = .*contiguous and packed"):
            admit_tensors(plan, {"q": lying[not planned]}, claims)
        with pytest.raises(ShapeError, match="k = "):
            admit_tensors(plan, {"k": Q}, claims)


def test_documents_are_those_of_the_plan(claims: AcceleratorCapabilities) -> None:
    given: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 6], dtype=torch.int32)}
    admit_tensors(attention(documents=True), given, claims)
    admit_tensors(attention(), {}, claims)
    for plan, tensors in ((attention(documents=True), {}), (attention(), given), (gemm(), given)):
        with pytest.raises(ArgumentError, match=r"plan.shape.documents"):
            admit_tensors(plan, tensors, claims)


def test_where_documents_begin_is_said_in_int32(claims: AcceleratorCapabilities) -> None:
    with pytest.raises(DtypeError, match="cu_seqlens = "):
        admit_tensors(attention(documents=True), {"cu_seqlens": torch.tensor([0, 6])}, claims)


def test_rows_of_experts_are_as_many_as_there_are(claims: AcceleratorCapabilities) -> None:
    x, ids, w = ones(3, 8), torch.tensor([[0], [1], [0]]), ones(2, 8, 4)
    plan = dispatch(x, ids, w).plan
    admit_tensors(plan, {"x": x, "topk_ids": ids, "w": w}, claims)
    assert {"x", "topk_ids", "w"} <= planned_tensors(plan).keys()
    for name, wrong in (("x", x[:2]), ("topk_ids", ids.expand(3, 2).contiguous()), ("w", w[:1])):
        with pytest.raises(ShapeError, match=f"{name} = "):
            admit_tensors(plan, {name: wrong}, claims)
    with pytest.raises(DtypeError, match="topk_ids = "):
        admit_tensors(plan, {"topk_ids": ids.float()}, claims)


def planned_of_two(op: str, shape: Any, **changes: Any) -> Any:
    """What a plan of two ranks has."""
    plan: Any = SimpleNamespace(
        op=op, shape=shape, world_size=2, dtype="float16", out_dtype="bfloat16", sums="float32",
        bias=None, norm=None, scales=None,
    )  # fmt: skip
    vars(plan).update(changes)
    return planned_tensors(plan)


def of_two_ranks(op: str, shape: Any, **changes: Any) -> dict[str, tuple[int | None, ...]]:
    """Shapes of its tensors."""
    found = planned_of_two(op, shape, **changes)
    return {name: wanted.shape for name, wanted in found.items()}


PRODUCT = GemmShape(m=256, n=96, k=384)
GATHER: dict[str, tuple[int, ...]] = {
    "a": (128, 384), "b": (384, 96), "out": (256, 96), "gathered": (256, 384)
}  # fmt: skip


def test_products_of_two_ranks() -> None:
    scattered = {"a": (256, 384), "b": (384, 96), "out": (128, 96)}
    assert of_two_ranks("all_gather_gemm", PRODUCT) == GATHER
    assert of_two_ranks("gemm_reduce_scatter", PRODUCT) == scattered
    assert of_two_ranks("gemm_all_reduce", PRODUCT) == scattered | {"out": (256, 96)}


def test_a_launch_takes_the_bias_that_it_adds() -> None:
    assert of_two_ranks("all_gather_gemm", PRODUCT, bias="launch") == GATHER | {"bias": (96,)}
    assert of_two_ranks("all_gather_gemm", PRODUCT, bias="after") == GATHER


@pytest.mark.parametrize(
    ("op", "shape"), [("gemm_all_reduce", PRODUCT), ("all_reduce", SumShape(m=256, n=96))]
)
def test_a_launch_that_normalises_takes_the_weight(op: str, shape: Any) -> None:
    plain = of_two_ranks(op, shape)
    after = NormStep(step="after", residual=True, eps=1e-6)
    assert of_two_ranks(op, shape, norm=after) == plain
    alone = plain | {"norm_weight": (96,), "residual_out": (256, 96)}
    launch = NormStep(step="launch", residual=False, eps=1e-6)
    assert of_two_ranks(op, shape, norm=launch) == alone
    both = NormStep(step="launch", residual=True, eps=1e-6)
    assert of_two_ranks(op, shape, norm=both) == alone | {"residual": (256, 96)}
    narrow = NormStep(step="launch", residual=False, eps=1e-6, quantises=True)
    quantised = {"quantised": (256, 96), "quantised_scale": (256, 1)}
    assert of_two_ranks(op, shape, norm=narrow) == alone | quantised


@pytest.mark.parametrize(
    ("mode", "of_a", "of_b", "gathered"),
    [
        ("tensor", (1, 1), (1, 1), (2, 1)),
        ("row", (128, 1), (1, 96), (256, 1)),
        ("block", (128, 3), (3, 1), (256, 3)),
    ],
)
def test_scales_of_two_ranks(
    mode: Any, of_a: tuple[int, int], of_b: tuple[int, int], gathered: tuple[int, int]
) -> None:
    found = of_two_ranks("all_gather_gemm", PRODUCT, scales=Scales(mode=mode))
    assert found == GATHER | {"a_scale": of_a, "b_scale": of_b, "gathered_scale": gathered}


EXPERTS = MoeShape(tokens=3, hidden=8, features=4, experts=6, top_k=2)
HOME = GemmCombineShape(tokens=3, hidden=8, features=4, experts=6, top_k=2, partial_dtype="float32")


def test_attention_and_experts_of_two_ranks() -> None:
    shape = AttentionShape(batch=1, heads=4, kv_heads=2, sequence=12, head_dim=8, causal=False)
    found = of_two_ranks("ring_attention", shape)
    assert (found["q"], found["k"], found["lse"]) == ((1, 4, 6, 8), (1, 2, 6, 8), (1, 4, 6))
    assert of_two_ranks("moe_dispatch_gemm", EXPERTS)["w"] == (3, 8, 4)
    assert of_two_ranks("moe_gemm_combine", HOME)["w2"] == (3, 4, 8)


def test_experts_in_e4m3_of_two_ranks() -> None:
    """Rows that the launch quantises have no scales yet, and a dtype of their own."""
    sizes = {"hidden": 384, "features": 256}
    given = {"dtype": "float8_e4m3fn", "scales": Scales(mode="block")}
    for op, shape, rows, weight, of_rows, of_w in (
        ("moe_dispatch_gemm", EXPERTS, "x", "w", (3, 3), (3, 3, 2)),
        ("moe_gemm_combine", HOME, "h", "w2", (None, 2), (3, 2, 3)),
    ):
        wide: Any = shape.model_copy(update=sizes)
        found = planned_of_two(op, wide, **given)
        assert found[f"{rows}_scale"].shape == of_rows
        assert found[f"{weight}_scale"].shape == of_w
        assert found[rows].dtypes == found[weight].dtypes == ("float8_e4m3fn",)
        given_16 = given | {"scales": Scales(mode="block", quantises="float16")}
        found = planned_of_two(op, wide, **given_16)
        assert f"{rows}_scale" not in found
        assert (found[rows].dtypes, found[weight].dtypes) == (("float16",), ("float8_e4m3fn",))


@pytest.mark.parametrize(
    ("op", "shape", "stored"),
    [
        ("all_gather_gemm", PRODUCT, {"b", "b_scale"}),
        ("moe_dispatch_gemm", EXPERTS, {"w", "w_scale", "grad_w"}),
        ("moe_gemm_combine", HOME, {"w2", "w2_scale", "grad_w2"}),
    ],
)
def test_weights_and_their_scales_lie_as_the_layout_says(
    op: str, shape: Any, stored: set[str]
) -> None:
    found = planned_of_two(op, shape, scales=Scales(mode="row"))
    assert {name for name, wanted in found.items() if wanted.stored} == stored


def test_operands_may_lie_apart_where_the_backend_takes_them_so(
    claims: AcceleratorCapabilities,
) -> None:
    """Rows begin at whole steps then, and only of what the backend reads."""
    apart, odd = ones(4, 32)[:, :16], ones(4, 17)[:, :16]
    assert not set(claims.takes_pitched("all_gather_gemm")) & {"a", "out"}
    takes = claims.model_copy(update={"pitched": ("a", "b"), "alignment_bytes": 16})
    admit_tensors(gemm(), {"a": apart}, takes)
    for given, there in (({"a": odd}, takes), ({"a": apart}, claims), ({"out": apart}, takes)):
        tensors = {name: each[:, :8] if name == "out" else each for name, each in given.items()}
        with pytest.raises(LayoutError, match="contiguous and packed"):
            admit_tensors(gemm(), tensors, there)


def test_weights_of_experts_lie_as_planned(claims: AcceleratorCapabilities) -> None:
    x, ids, w = ones(3, 8), torch.tensor([[0], [1], [0]]), ones(2, 8, 4)
    by_columns = w.transpose(1, 2).contiguous().transpose(1, 2)
    for given, other in ((w, by_columns), (by_columns, w)):
        plan = dispatch(x, ids, given).plan
        admit_tensors(plan, {"w": given}, claims)
        with pytest.raises(LayoutError, match=r"w = .*-major and packed"):
            admit_tensors(plan, {"w": other}, claims)
