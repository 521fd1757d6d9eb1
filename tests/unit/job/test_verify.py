"""The judge: right results pass, and each planted fault fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mkernel.job import verify
from mkernel.job.inputs import RandomInputs
from mkernel.job.spec import JobSpec

WORLD = 4


def spec(dtype: str, out_dtype: str, replicate_b: bool = True) -> JobSpec:
    return JobSpec(
        "all_gather_gemm", 512, 96, 256, dtype, out_dtype, replicate_b, None, (), None, 0, 1, 1
    )  # type: ignore[arg-type]


def product(inputs: RandomInputs, iteration: int, rank: int = 1) -> torch.Tensor:
    a = torch.cat([inputs.a(source, iteration) for source in range(WORLD)])
    return a.float() @ inputs.b(rank, iteration).float()


def error_of(result: torch.Tensor, inputs: RandomInputs, iteration: int = 2) -> float:
    return verify.all_gather_gemm(result, inputs, 1, WORLD, iteration)


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("replicate_b", [True, False])
def test_one_rounding_passes(out_dtype: str, replicate_b: bool) -> None:
    inputs = RandomInputs(spec("float16", out_dtype, replicate_b), WORLD)
    result = product(inputs, 2).to(getattr(torch, out_dtype))
    assert error_of(result, inputs) <= verify.TOLERANCE[out_dtype]  # type: ignore[index]


def bf16_sums(inputs: RandomInputs) -> torch.Tensor:
    """Partial sums kept in bfloat16 over 8 pieces of K."""
    a = torch.cat([inputs.a(source, 2) for source in range(WORLD)]).float()
    b = inputs.b(1, 2).float()
    total = torch.zeros(len(a), b.shape[1], dtype=torch.bfloat16)
    for piece in range(0, 256, 32):
        total += (a[:, piece : piece + 32] @ b[piece : piece + 32]).bfloat16()
    return total


def without_last_rows(inputs: RandomInputs) -> torch.Tensor:
    result = product(inputs, 2)
    result[-1] = float("nan")
    return result


FAULTS: dict[str, Callable[[RandomInputs], torch.Tensor]] = {
    "zeros": lambda inputs: torch.zeros(512, 96),
    "the previous iteration's result": lambda inputs: product(inputs, 1),
    "an unwritten row": without_last_rows,
    "a missing row": lambda inputs: product(inputs, 2)[:-1],
    "another rank's B": lambda inputs: product(inputs, 2, rank=2),
    "ranks in the wrong order": lambda inputs: product(inputs, 2).roll(128, 0),
    "fp16 rounding in a float32 result": lambda inputs: product(inputs, 2).half().float(),
    "one wrong element": lambda inputs: product(inputs, 2).index_put(
        (torch.tensor(7), torch.tensor(9)), torch.tensor(50.0)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_fail(fault: str) -> None:
    inputs = RandomInputs(spec("float16", "float32", replicate_b=False), WORLD)
    assert not error_of(FAULTS[fault](inputs), inputs) <= verify.TOLERANCE["float32"]


def test_bf16_partial_sums_fail_in_bfloat16() -> None:
    inputs = RandomInputs(spec("bfloat16", "bfloat16"), WORLD)
    assert error_of(bf16_sums(inputs), inputs) > verify.TOLERANCE["bfloat16"]


def test_non_finite_values_must_match() -> None:
    nan, infinity = float("nan"), float("inf")
    reference = torch.tensor([1.0, nan, infinity, -infinity], dtype=torch.float64)
    assert verify.compare(reference.float(), reference)[0] == 0
    for wrong in (
        [nan, nan, infinity, -infinity],
        [1.0, 2.0, infinity, -infinity],
        [1.0, nan, -infinity, -infinity],
        [1.0, infinity, infinity, -infinity],
    ):
        assert verify.compare(torch.tensor(wrong), reference)[0] == infinity


def test_a_nan_error_does_not_pass() -> None:
    assert not verify.Verdict(float("nan"), 1.0).passed


def test_inputs_are_fresh_and_reproducible() -> None:
    inputs = RandomInputs(spec("float16", "float32", replicate_b=False), WORLD)
    assert torch.equal(inputs.a(0, 1), inputs.a(0, 1))
    for other in (inputs.a(1, 1), inputs.a(0, 2)):
        assert not torch.equal(inputs.a(0, 1), other)
    assert not torch.equal(inputs.b(0, 1), inputs.b(1, 1))
    whole = RandomInputs(spec("float16", "float32", replicate_b=True), WORLD)
    assert torch.equal(whole.b(0, 1), whole.b(3, 1))
