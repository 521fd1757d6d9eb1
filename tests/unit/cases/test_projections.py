"""All rows of large results are compared by their products with random columns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mkernel.backends.contracts.scaled import dequantised, quantised_blocks
from mkernel.cases import case_of, poison
from mkernel.cases.comparison import compare_alike, compare_projected
from mkernel.cases.moe import gated, wide
from mkernel.cases.parts import Collective, Product, Transfer

GEMM = {"m": 24, "n": 20, "k": 16}
MOE = {"tokens": 12, "hidden": 16, "features": 16, "experts": 4, "top_k": 2}
COMBINE = {name: size for name, size in MOE.items() if name != "hidden"}


def columns(count: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(count)
    return torch.randn(count, 8, generator=chance, dtype=torch.float64)


def oracle(op: str, sizes: dict[str, int], **options: Any) -> Any:
    dtype: Any = options.pop("dtype", "bfloat16")
    return case_of(op)(sizes, dtype, "bfloat16", seed=4, options=options)


@pytest.mark.parametrize(("op", "sizes", "options"), [
    ("all_gather_gemm", GEMM, {}),
    ("all_gather_gemm", GEMM, {"replicate_b": False, "bias": True}),
    ("gemm_reduce_scatter", GEMM, {"bias": True}),
    ("gemm_all_reduce", GEMM, {}),
    ("gemm_all_reduce", {**GEMM, "k": 128}, {"dtype": "float8_e4m3fn", "scales": "row"}),
    ("all_gather_gemm", {**GEMM, "k": 128}, {"dtype": "float8_e4m3fn", "scales": "row"}),
    ("all_reduce", {"m": 24, "n": 20}, {}),
    ("all_reduce", {"m": 24, "n": 20}, {"norm": "residual"}),
    ("moe_dispatch_gemm", MOE, {}),
    ("moe_combine", COMBINE, {}),
    ("moe_gemm_combine", MOE, {}),
    ("moe_layer", MOE, {}),
])  # fmt: skip
def test_they_are_the_reference_times_columns(
    op: str, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    case = oracle(op, sizes, **options)
    oracles = [case]
    if sizes is GEMM and not options:
        oracles += [kind(case) for kind in (Product, Collective, Transfer)]
    for each in oracles:
        for rank in range(2):
            names = [name for name in each.results(2) if (op, name) != ("moe_dispatch_gemm", "out")]
            assert each.projects(names)
            found = each.truths(rank, 2, 3, names, onto=columns)
            wanted = each.reference(rank, 2, 3)
            for name, narrow in found.items():
                whole = wanted[name]
                if name in each.tolerances():
                    whole = whole @ columns(whole.shape[1])
                torch.testing.assert_close(narrow, whole.to(narrow.dtype))


def test_what_has_none_says_so() -> None:
    assert not oracle("gemm_all_reduce", GEMM, norm="alone").projects(["out", "residual_out"])
    assert not oracle("moe_dispatch_gemm", MOE, activation="silu_and_mul").projects(["outputs"])
    assert not oracle("moe_dispatch_gemm", MOE).projects(["outputs", "counts", "out"])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_any_wrong_row_is_seen_and_roundings_are_not(scale: float) -> None:
    chance = torch.Generator().manual_seed(1)
    exact = scale * torch.randn(4000, 300, generator=chance, dtype=torch.float64)
    exact[:, :] *= 4.0 ** (torch.arange(4000)[:, None] % 3)  # rows of unlike sizes
    exact[7] = 0
    result, few = exact.bfloat16(), columns(300)
    right = compare_projected(result, exact @ few, few)
    frobenius = float((result.double() - exact).norm() / exact.norm())
    assert right.error == pytest.approx(frobenius, rel=0.05)
    assert right.elements == result.numel()
    assert compare_alike(result, result.clone()).error == 0
    for row in (0, 7, 1999, 3998):
        for other in (exact[row + 1], exact[row + 1] / 64, torch.zeros(300)):
            wrong = result.clone()
            wrong[row] = other.bfloat16()
            if torch.equal(wrong[row], result[row]):
                continue
            assert compare_projected(wrong, exact @ few, few).error > 0.1, (row, other[0])
            assert compare_alike(wrong, result).error > 0.1, (row, other[0])


def test_what_has_no_error_says_why() -> None:
    few = columns(10)
    exact = torch.randn(200, 10, dtype=torch.float64)
    for made, why in (
        (exact[:199].bfloat16(), "has shape (199, 10), not (200, 10)"),
        (exact[:, :9].bfloat16(), "has shape (200, 9), not (200, 10)"),
    ):
        assert compare_projected(made, exact @ few, few).why == why
    result = exact.bfloat16()
    result[3, 4] = math.inf
    assert compare_projected(result, exact @ few, few).why == "has elements that are not finite"
    assert "finite in one call" in compare_alike(result, exact.bfloat16()).why
    poison.fill(result[5])
    found = compare_projected(result, exact @ few, few)
    assert found.why == "has 10 of 2000 elements that were never written"
    assert not found.within(1.0)


def test_zeros_are_compared_without_a_ratio() -> None:
    few = columns(10)
    nothing = torch.zeros(200, 10)
    assert compare_projected(nothing, torch.zeros(200, 8).double(), few).error == 0
    assert compare_projected(nothing, torch.ones(200, 8).double(), few).error > 0.3


def test_a_row_of_a_layer_may_be_on_other_steps_and_none_is_a_fifth_off() -> None:
    """Sums before an activation in e4m3 are off as those of matrix units: by 1.9e-4. Few elements
    decide how far a row is then off."""
    sizes = {"tokens": 1024, "hidden": 384, "features": 512, "experts": 8, "top_k": 4}
    layer = oracle("moe_layer", sizes, dtype="float8_e4m3fn", scales="block")
    given, truth = layer.inputs(0, 1, 0), layer.reference(0, 1, 0, onto=columns)["out"]
    x = dequantised(given["x"], given["x_scale"], torch.float64)
    up, down = wide(given["w"], given["w_scale"]), wide(given["w2"], given["w2_scale"])
    chance, out = torch.Generator().manual_seed(0), torch.zeros(x.shape).double()
    for expert, (first, second) in enumerate(zip(up, down, strict=True)):
        token, slot = (given["topk_ids"] == expert).nonzero(as_tuple=True)
        sums = x[token] @ first.double()
        noise = torch.randn(sums.shape, generator=chance).double()
        sums += 1.9e-4 * sums.square().mean(1, keepdim=True).sqrt() * noise
        between = dequantised(*quantised_blocks(gated(sums)), torch.float64)
        out[token] += given["topk_weights"][token, slot, None] * (between @ second.double())
    out, few, limit = out.bfloat16(), columns(384), layer.tolerance
    assert compare_projected(out, truth, few).error > limit
    assert compare_projected(out, truth, few, layer.row_share).error < limit
    out[7] *= 1.2
    assert compare_projected(out, truth, few, layer.row_share).error > limit
