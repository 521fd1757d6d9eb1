"""Flags that copy engines copy behind their data, a million times: whoever sees one sees the data.

The checks are native (``tests/native/cuda/copied_flags.cu``), by plain loads and by bulk loads; each
planted fault must be caught by both, every time.
"""

from __future__ import annotations

import pytest
from device_buffers import needs_gpus
from native_programs import NativeProgram

PROGRAM = NativeProgram("copied_flags", timeout_s=240.0)
FAULTS = ("flag_before_data", "flag_on_another_stream", "last_word_left_out")
ITERATIONS = 1_000_000
FAULTY_ITERATIONS = 4000
"""Laps of both kinds, with traffic beside them and without."""
pytestmark = [
    needs_gpus(2),
    PROGRAM.is_built,
]


@pytest.mark.alone
def test_who_sees_the_flag_sees_the_data() -> None:
    told = PROGRAM.told("check", ITERATIONS)
    assert told["waits"] is True
    assert told["iterations"] == ITERATIONS
    for kind in ("eager", "in_graphs", "beside_traffic"):
        assert told[kind] == ITERATIONS // 2
    assert told["traffic_gb"] > 0
    assert min(told["iterations_of_bytes"].values()) > ITERATIONS // 4
    assert told["in_slices"] > ITERATIONS // 10
    assert told["wrong_words"] == told["wrong_iterations"] == {"plain": 0, "bulk": 0}
    # Nothing is shown by flags that have come long before anybody looks.
    assert told["waited"] > ITERATIONS // 10


def test_all_planted_faults_are_known() -> None:
    assert tuple(PROGRAM.run("faults").stdout.split()) == FAULTS


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    """In every iteration, for certain: of the first two, data come when they have been looked at."""
    told = PROGRAM.told("check", FAULTY_ITERATIONS, fault)
    always = {"plain": FAULTY_ITERATIONS, "bulk": FAULTY_ITERATIONS}
    assert told["waits"] is True
    assert told["wrong_iterations"] == always
    if fault == "last_word_left_out":
        assert told["wrong_words"] == always
