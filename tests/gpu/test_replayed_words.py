"""Words that are set and words that are added to, under plans that share them: eager calls and replays.

The checks are native (``tests/native/cuda/replayed_words.cu``); each planted fault must be caught.
"""

from __future__ import annotations

import pytest
from device_buffers import needs_gpus
from native_programs import NativeProgram

PROGRAM = NativeProgram("replayed_words")
FAULTS = ("count_not_moved_on", "count_moved_on_twice", "set_goes_back", "epoch_of_the_launch")
pytestmark = [
    needs_gpus(1),
    PROGRAM.is_built,
]
on_one_gpu_or_two = pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=needs_gpus(2))])


@on_one_gpu_or_two
def test_plans_share_words_in_any_order_of_launches_and_replays(gpus: int) -> None:
    found = PROGRAM.told("check", gpus)
    assert found.pop("calls") > 200
    assert found == {
        "values": True, "waits": True, "counts": True, "replays": 100, "eager": 100
    }  # fmt: skip


def test_all_planted_faults_are_known() -> None:
    assert tuple(PROGRAM.run("faults").stdout.split()) == FAULTS


@on_one_gpu_or_two
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, gpus: int) -> None:
    """By the check that is named beside it: the program says so by its exit code."""
    done = PROGRAM.run("check", gpus, fault)
    assert done.returncode == 0, done.stdout + done.stderr
