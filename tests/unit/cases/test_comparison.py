"""The one judge of results: what it lets pass, and what it says of the rest."""

from __future__ import annotations

import math

import pytest
import torch

from mkernel.cases import Comparison, compare, poison
from mkernel.cases.comparison import FEW, compare_exact

NAN, INFINITY = math.nan, math.inf


def wide(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_error_is_relative_and_counts_what_it_is_taken_over() -> None:
    found = compare(torch.tensor([3.0, 4.0]), wide(3, 3))
    assert found == Comparison(pytest.approx(1 / math.sqrt(18)), 2)
    assert compare(torch.tensor([0.0, 0.5]), wide(0, 0)).error == 0.5


def test_of_few_elements_every_one_may_be_rounded_by_half_a_step() -> None:
    """So are 3.4e-3 off all of these, just above a power of two, of which bfloat16 has every 7.8e-3."""
    truth = torch.full((FEW + 1,), 1 + 0.44 * 2.0**-7, dtype=torch.float64)
    rounded = truth.bfloat16()
    few, many = compare(rounded[:FEW], truth[:FEW]), compare(rounded, truth)
    assert [few.error, many.error] == pytest.approx([3.43e-3] * 2, rel=1e-2)
    assert few.within(3e-3)
    assert (few.limit(3e-3), many.limit(3e-3)) == (2.0**-8, 3e-3)
    assert not many.within(3e-3)
    cut_off = (truth + 2.0**-8).bfloat16()  # to the next number, not to the nearest
    assert not compare(cut_off[:FEW], truth[:FEW]).within(3e-3)
    assert not (few + compare(cut_off[:FEW], truth[:FEW])).within(3e-3)
    assert not Comparison(NAN, 5, rounding=1.0).within(1.0)


def test_non_finite_values_must_match() -> None:
    reference = wide(1, NAN, INFINITY, -INFINITY)
    assert compare(reference.float(), reference) == Comparison(0.0, 1)
    for wrong, why in (
        ([NAN, NAN, INFINITY, -INFINITY], "1 of 4 elements that are NaN"),
        ([1.0, 2.0, INFINITY, -INFINITY], "1 of 4 elements that are not the NaN or infinity"),
        ([1.0, NAN, -INFINITY, -INFINITY], "1 of 4 elements that are not the NaN or infinity"),
        ([1.0, NAN, 1.0, -INFINITY], "1 of 4 elements that are not the NaN or infinity"),
        ([1.0, INFINITY, INFINITY, -INFINITY], "1 of 4 elements that are not the NaN or infinity"),
        ([INFINITY, NAN, INFINITY, -INFINITY], "1 of 4 elements that are infinite"),
        ([1.0, NAN, NAN, -INFINITY], "1 of 4 elements that are NaN"),
    ):
        found = compare(torch.tensor(wrong), reference)
        assert found.error == INFINITY, wrong
        assert why in found.why


def test_what_was_never_written_is_found_where_the_reference_is_nan() -> None:
    reference = torch.ones(4, 5, dtype=torch.float64)
    reference[3] = NAN
    result = reference.float()
    assert compare(result, reference) == Comparison(0.0, 15)
    poison.fill(result[3])
    found = compare(result, reference)
    assert found.error == INFINITY
    assert found.why == "has 5 of 20 elements that were never written"


@pytest.mark.parametrize("value", [NAN, INFINITY])
def test_a_comparison_of_nothing_fails(value: float) -> None:
    reference = torch.full((4, 5), value, dtype=torch.float64)
    found = compare(reference.float(), reference)
    assert found.error == INFINITY
    assert found.elements == 0
    assert "nothing that could be compared: none of 20 elements" in found.why


def test_a_result_of_no_elements_is_right_where_its_shape_is() -> None:
    empty = torch.empty(0, 5, dtype=torch.float64)
    assert compare(empty.half(), empty) == Comparison(0.0, 0)
    found = compare(torch.empty(0, 4), empty)
    assert found.error == INFINITY
    assert found.why == "has shape (0, 4), not (0, 5)"


def test_a_right_rounding_may_overflow() -> None:
    """Beyond float16's largest number, 65504, infinity is right, and a number is compared."""
    reference = wide(1, 65520, -1e6, 65504)
    assert compare(reference.half(), reference) == Comparison(0.0, 2)  # 1 and 65504 are compared
    saturated = torch.tensor([1.0, 65504.0, -65504.0, 65504.0]).half()
    found = compare(saturated, reference)
    assert found.elements == 4
    assert 0.5 < found.error < 1
    for wrong in (
        [1.0, INFINITY, INFINITY, 65504.0],  # of the other sign
        [1.0, INFINITY, -INFINITY, INFINITY],  # within range
        [1.0, NAN, -INFINITY, 65504.0],
    ):
        assert compare(torch.tensor(wrong).half(), reference).error == INFINITY
    everything = wide(1e6, -1e6)
    assert "nothing that could be compared" in compare(everything.half(), everything).why


def test_equal_is_equal() -> None:
    wanted = torch.tensor([1, 2, 3])
    assert compare_exact(wanted.int(), wanted) == Comparison(0.0, 3)
    found = compare_exact(torch.tensor([1, 5, 3]), wanted)
    assert found.error == INFINITY
    assert found.why == "is not equal to the reference in 1 of 3 elements"
    assert "has shape (2,), not (3,)" in compare_exact(wanted[:2], wanted).why


def test_two_calls_add_up_to_the_worse_one() -> None:
    right, worse, wrong = Comparison(1e-3, 5), Comparison(2e-3, 5), Comparison(INFINITY, 0, "is x")
    assert right + worse == worse + right == Comparison(2e-3, 10)
    assert right + wrong == wrong + right == Comparison(INFINITY, 5, "is x")
    assert math.isnan((wrong + Comparison(NAN, 5)).error)
