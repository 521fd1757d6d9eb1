"""When a planted fault counts as caught."""

from __future__ import annotations

from typing import Any

import pytest

from mkernel.backends.accelerators.streams import StreamsAccelerator
from mkernel.backends.contracts.accelerator import Launch
from mkernel.conformance import planted
from mkernel.conformance.accelerator import AcceleratorSubject
from mkernel.conformance.check import Check
from mkernel.conformance.faults.altering import Honest
from mkernel.conformance.faults.launching import SkipsWaits
from mkernel.conformance.kit import Kit
from mkernel.errors import ShapeError, Unsupported
from mkernel.harness.outcome import CheckFailed, CheckSkipped, HarnessError
from mkernel.plan.schedule import Schedule


@pytest.mark.parametrize(
    ("error", "caught"),
    [
        (CheckFailed("row 3 is wrong"), True),
        (Unsupported("no such op, though it is claimed"), True),
        (None, False),
        (CheckSkipped("not claimed"), False),
        (HarnessError("rank 0 did not run"), False),
        (KeyError("out"), False),
        (ShapeError("y", (3, 4), "[2, D]"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_the_checks_own_judgement_counts(
    error: Exception | None, caught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(subject: AcceleratorSubject) -> None:
        assert subject.first_find
        if error is not None:
            raise error

    kit = Kit("a kit", AcceleratorSubject("streams"), (Check("shapes", "every shape", run),))
    monkeypatch.setattr(planted, "kit_for", lambda *arguments, **options: kit)
    (row,) = planted.judge_one("mkernel.conformance.faults:Fault", ["shapes"])
    assert row.caught == caught, row.message


@pytest.mark.parametrize("ends", [True, False])
def test_a_call_that_the_world_does_not_know_ends_before_its_memory_goes(ends: bool) -> None:
    asked = []

    class Later(Launch):
        def wait(self, timeout_s: float) -> bool:
            asked.append(timeout_s)
            return ends

    fault = SkipsWaits()
    fault._later = Later()
    assert fault.close(0.5) is ends
    assert asked == [0.5]


def test_a_wrapper_schedules_as_what_it_wraps() -> None:
    """Its plans are the wrapped backend's, whose launches read them."""

    class Scheduling(StreamsAccelerator):
        @classmethod
        def schedule(cls, request: Any) -> Any:
            return Schedule(kind="tests.wrapped")

    wrapper = Honest()
    wrapper.inner = Scheduling()
    assert wrapper.schedule(None) == Schedule(kind="tests.wrapped")  # type: ignore[arg-type, comparison-overlap]
