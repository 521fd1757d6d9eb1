"""Litmus tests of the orders that kernels rely on, on one GPU and between two.

The checks are native (``tests/native/cuda/litmus.cu``). Data that are written after the reader has
looked must be found wrong in every iteration, by every test.
"""

from __future__ import annotations

import pytest
from device_buffers import needs_gpus
from native_programs import NativeProgram

PROGRAM = NativeProgram("litmus", timeout_s=120.0)
ORDERS = ("set", "add", "fenced", "every_thread", "passed_on", "words")
ITERATIONS, LATE_ITERATIONS = 200_000, 2_000
pytestmark = [
    needs_gpus(1),
    PROGRAM.is_built,
]
on_one_gpu_or_two = pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=needs_gpus(2))])


@on_one_gpu_or_two
def test_who_sees_the_word_sees_the_data(gpus: int) -> None:
    found = PROGRAM.told("check", gpus, ITERATIONS)
    assert found.pop("iterations") == ITERATIONS
    assert found.pop("unordered") >= 0  # it is allowed
    assert found == dict.fromkeys(ORDERS, 0)


@on_one_gpu_or_two
def test_data_that_come_late_are_found_wrong(gpus: int) -> None:
    found = PROGRAM.told("check", gpus, LATE_ITERATIONS, "late")
    found.pop("iterations")
    assert found == dict.fromkeys((*ORDERS, "unordered"), LATE_ITERATIONS)
