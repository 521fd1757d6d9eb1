"""What a backend claims decides what it is given, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from plan_worlds import CAPABILITIES, explained

from mkernel.backends import registry
from mkernel.errors import ArgumentError, DtypeError, LayoutError, ShapeError
from mkernel.plan.arguments import Around, Norm, scale_sizes
from mkernel.plan.model import BLOCK, E4M3, AttentionShape, Scales, first_difference
from mkernel.plan.shapes import GEMMS, takes

ATTENTION = {"batch": 1, "heads": 2, "kv_heads": 2, "sequence": 48, "head_dim": 16}
EXPERTS = {"tokens": 8, "hidden": 64, "features": 64, "experts": 4, "top_k": 1}


def planned(op: str, sizes: dict[str, Any], claims: dict[str, Any], **options: Any) -> Any:
    made = CAPABILITIES.model_copy(update={"ops": (op,), **claims})
    return explained(op, sizes, 1, 2, capabilities=made, **options).plan


def test_scales_have_a_shape_by_mode() -> None:
    assert scale_sizes("tensor", 7, 300, 512) == ((1, 1), (1, 1))
    assert scale_sizes("row", 7, 300, 512) == ((7, 1), (1, 300))
    assert scale_sizes("block", 7, 300, 4 * BLOCK) == ((7, 4), (4, 3))


def test_the_default_result_of_scaled_operands_is_one_that_is_claimed() -> None:
    claims = {"scale_modes": ("row",), "out_dtypes": ("float32",)}
    made = planned(
        "all_gather_gemm", {"m": 256, "n": 256, "k": 256}, claims,
        dtype=E4M3, b_layout="column", around=Around(scales=Scales(mode="row")),
    )  # fmt: skip
    assert made.out_dtype == "float32"


def test_shards_that_must_be_packed_are_those_of_a_gather_alone() -> None:
    claims = CAPABILITIES.model_copy(update={"pitched": ("a", "b"), "packed_shards": True})
    assert claims.takes_pitched("all_gather_gemm") == ("b",)
    assert claims.takes_pitched("gemm_reduce_scatter") == ("a", "b")
    anywhere = claims.model_copy(update={"packed_shards": False})
    assert anywhere.takes_pitched("all_gather_gemm") == ("a", "b")


def test_a_process_group_carries_all_between_nodes_and_no_puts_inside_one() -> None:
    claims = CAPABILITIES.model_copy(update={"process_group": True, "put_ops": ("all_reduce",)})
    found = [claims.group_carries("all_reduce", nodes) for nodes in (1, 2)]
    assert found == [False, True]
    assert claims.group_carries("ring_attention", 1)
    assert not CAPABILITIES.group_carries("ring_attention", 2)


def test_a_layout_that_there_is_none_of_is_no_layout_that_a_backend_lacks() -> None:
    with pytest.raises(ArgumentError, match="b_layout = 'diagonal'") as raised:
        planned("all_gather_gemm", {"m": 256, "n": 256, "k": 256}, {}, b_layout="diagonal")
    assert type(raised.value) is ArgumentError


@pytest.mark.parametrize("adds", [False, True])
def test_who_adds_a_bias(adds: bool) -> None:
    sizes = {"m": 256, "n": 256, "k": 256}
    for bias, step in ((True, "launch" if adds else "after"), (False, None)):
        made = planned("all_gather_gemm", sizes, {"adds_bias": adds}, around=Around(bias=bias))
        assert made.bias == step


def test_backends_differ_in_what_attention_they_take() -> None:
    claims = CAPABILITIES.model_copy(update={"head_dims": (16,)})
    other = {**ATTENTION, "head_dim": 32}
    assert takes(claims, "ring_attention", ATTENTION, 2, "float16")
    assert not takes(claims, "ring_attention", other, 2, "float16")
    assert takes(claims, "ring_attention", {**other, "heads": 0}, 2, "float16")


def test_blocks_of_scales_cover_k() -> None:
    claims = {"scale_modes": ("block",)}
    options: dict[str, Any] = {
        "dtype": E4M3, "out_dtype": "float32", "b_layout": "column",
        "around": Around(scales=Scales(mode="block")),
    }  # fmt: skip
    planned("all_gather_gemm", {"m": 256, "n": 256, "k": 2 * BLOCK}, claims, **options)
    with pytest.raises(ShapeError, match=f"k = 192 .* multiple of {BLOCK}"):
        planned("all_gather_gemm", {"m": 256, "n": 256, "k": 192}, claims, **options)


@pytest.mark.parametrize(
    ("op", "k"), [("moe_dispatch_gemm", "hidden"), ("moe_gemm_combine", "features")]
)
def test_experts_in_e4m3_are_planned_where_they_are_claimed(op: str, k: str) -> None:
    sizes = {**EXPERTS, "hidden": BLOCK, "features": BLOCK}
    options: dict[str, Any] = {
        "dtype": E4M3, "out_dtype": "float32", "b_layout": "column",
        "around": Around(scales=Scales(mode="block", quantises="bfloat16")),
    }  # fmt: skip
    claims = {"scaled_experts": True, "b_layouts": ("row", "column")}
    made = planned(op, sizes, claims, **options)
    assert made.scales == options["around"].scales
    for wrong, scales in (("tensor", {}), ("quantises", {"quantises": "float32"})):
        mode = "tensor" if wrong == "tensor" else "block"
        around = Around(scales=Scales.model_validate({"mode": mode, **scales}))
        with pytest.raises(ArgumentError, match=wrong):
            planned(op, sizes, claims, **{**options, "around": around})
    with pytest.raises(ShapeError, match=f"{k} = 192 .* multiple of {BLOCK}"):
        planned(op, {**sizes, k: 192}, claims, **options)
    with pytest.raises(LayoutError, match=r"w = .*K-major"):
        planned(op, sizes, claims, **{**options, "b_layout": "row"})
    there = registry.accelerator("ascend").capabilities()
    assert not there.scaled_experts
    if op in there.ops:
        with pytest.raises(DtypeError, match=f"of e4m3 operands none in {op}") as raised:
            explained(op, sizes, 1, 2, capabilities=there, **options)
        assert not raised.value.why
    without = {**claims, "scaled_experts": False, "why_no_scaled_experts": "a library lacks it"}
    with pytest.raises(DtypeError, match=r"block scales is not legal \(a library lacks it\)"):
        planned(op, sizes, without, **options)


def test_rows_that_are_quantised_are_those_of_experts() -> None:
    around = Around(scales=Scales(mode="row", quantises="bfloat16"))
    with pytest.raises(ArgumentError, match=r"quantises = bfloat16 .* all_gather_gemm takes e4m3"):
        planned(
            "all_gather_gemm", {"m": 256, "n": 256, "k": 256}, {"scale_modes": ("row",)},
            dtype=E4M3, b_layout="column", around=around,
        )  # fmt: skip


def test_a_chip_s_cores_are_used_as_far_as_kernels_are_built_for_them() -> None:
    claims = CAPABILITIES.model_copy(
        update={"compute_cores": 8, "comm_cores": 48, "most_cores": 100}
    )
    for cores, used in ((40, 40), (100, 100), (120, 100)):
        here = claims.with_cores(cores)
        assert (here.compute_cores, here.comm_cores) == (used, min(used, 48))
    assert claims.with_cores(None) is claims
    assert claims.with_cores(8).comm_cores == 8


def test_rows_of_heads_are_aligned() -> None:
    planned("ring_attention", ATTENTION, {})
    with pytest.raises(ShapeError, match=r"head_dim = 12 .* 8"):
        planned("ring_attention", {**ATTENTION, "head_dim": 12}, {})


def test_a_causal_sequence_is_cut_twice_as_often() -> None:
    claims = CAPABILITIES.model_copy(update={"positions": 8})
    full, causal = (AttentionShape(**ATTENTION, causal=each) for each in (False, True))
    assert (claims.sequence_step(full, 3), claims.sequence_step(causal, 3)) == (24, 48)
    assert claims.takes_attention("ring_attention", full, 6)
    assert not claims.takes_attention("ring_attention", causal, 6)


def test_what_a_sequence_must_be_a_multiple_of_is_said_in_ranks_and_positions() -> None:
    with pytest.raises(ShapeError) as alone:
        planned("ring_attention", {**ATTENTION, "sequence": 47}, {})
    assert "the number of ranks" in str(alone.value)
    assert "times" not in str(alone.value)
    with pytest.raises(ShapeError, match="the number of ranks, times 8"):
        planned("ring_attention", {**ATTENTION, "sequence": 47}, {"positions": 8})


def test_packed_documents_are_refused_where_they_are_not_claimed() -> None:
    with pytest.raises(ArgumentError, match="documents = True"):
        planned("ring_attention", {**ATTENTION, "documents": True}, {})


def test_rows_of_experts_results_are_aligned_too() -> None:
    planned("moe_gemm_combine", EXPERTS, {"alignment_bytes": 32})
    for name in ("hidden", "features"):
        with pytest.raises(ShapeError, match=name):
            planned("moe_gemm_combine", {**EXPERTS, name: 60}, {"alignment_bytes": 32})


def test_a_list_differs_from_what_is_none() -> None:
    assert first_difference({"x": [1]}, {"x": 3}, "") == ("x", [1], 3)
    assert first_difference({"x": 3}, {"x": (1,)}, "") == ("x", 3, (1,))
    assert first_difference({"x": [1, 2]}, {"x": (1, 3)}, "") == ("x[1]", 2, 3)
    assert first_difference({"x": [1]}, {"x": (1,)}, "") is None


@pytest.mark.parametrize("op", sorted({*GEMMS, "all_reduce"}))
def test_an_accelerator_takes_products_and_sums_of_its_dtypes(op: str) -> None:
    """In a world of several, what the first claims no dtype for runs on the next."""
    hopper, streams = (registry.accelerator(name).capabilities() for name in ("hopper", "streams"))
    for dtype, by_hopper in (("bfloat16", True), ("float32", False)):
        assert takes(hopper, op, {}, 2, dtype) is by_hopper
        assert takes(streams, op, {}, 2, dtype)
    assert takes(hopper, op, {}, 2, None), "before the dtype is known"


def test_experts_have_one_accelerator_whatever_their_dtype() -> None:
    hopper = registry.accelerator("hopper").capabilities()
    assert takes(hopper, "moe_dispatch_gemm", {}, 2, "float32")


def test_operands_of_e4m3_lie_as_matrix_units_read_them() -> None:
    with pytest.raises(LayoutError, match=r"b = row-major .*K-major"):
        planned(
            "all_gather_gemm", {"m": 256, "n": 256, "k": 256}, {"scale_modes": ("row",)},
            dtype=E4M3, b_layout="row", around=Around(scales=Scales(mode="row")),
        )  # fmt: skip


def test_attention_lies_as_it_is_claimed() -> None:
    sizes = {**ATTENTION, "layout": "positions"}
    with pytest.raises(LayoutError, match=r"layout = 'positions' .*one of: heads"):
        planned("ring_attention", sizes, {"attention_layouts": ("heads",)})
    claims = {"attention_layouts": ("heads", "positions")}
    assert planned("ring_attention", sizes, claims).shape.layout == "positions"


@pytest.mark.parametrize(
    ("adds_bias", "adds_norm", "bias", "step"),
    [
        (True, True, True, "launch"), (False, True, False, "launch"),
        (False, True, True, "after"), (True, False, False, "after"), (False, False, True, "after"),
    ],
)  # fmt: skip
def test_a_launch_normalises_where_nothing_is_added_behind_it(
    adds_bias: bool, adds_norm: bool, bias: bool, step: str
) -> None:
    made = planned(
        "gemm_all_reduce", {"m": 256, "n": 256, "k": 256},
        {"adds_bias": adds_bias, "adds_norm": adds_norm},
        around=Around(bias=bias, norm=Norm(True, 1e-6)),
    )  # fmt: skip
    assert made.norm.step == step


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize(
    ("adds_norm", "claimed", "bias"),
    [(True, True, False), (True, False, False), (False, True, False), (True, True, True)],
)
def test_a_launch_quantises_what_it_normalises(
    adds_norm: bool, claimed: bool, bias: bool, wanted: bool
) -> None:
    made = planned(
        "gemm_all_reduce", {"m": 256, "n": 256, "k": 256},
        {"adds_bias": False, "adds_norm": adds_norm, "quantises_norms": claimed},
        around=Around(bias=bias, norm=Norm(True, 1e-6, wanted)),
    )  # fmt: skip
    assert made.norm.quantises == (adds_norm and claimed and not bias and wanted)


@pytest.mark.parametrize("name", ["features", "kind"])
def test_sizes_of_other_ops_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{name} = 3 .*none: all_gather_gemm takes m, n, k"):
        planned("all_gather_gemm", {"m": 256, "n": 256, "k": 256, name: 3}, {})


def test_heads_are_a_multiple_of_those_of_keys() -> None:
    with pytest.raises(ShapeError, match=r"heads = 3 .*kv_heads"):
        planned("ring_attention", {**ATTENTION, "heads": 3}, {})
