"""When a planted fault counts as caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
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
from mkernel.plan.model import Schedule


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


def test_a_fault_at_the_verbs_is_not_planted_without_the_library_that_makes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wheel has no such library. That nothing was judged is no success."""
    table = "mkernel.conformance.nic_faults"
    monkeypatch.setattr(
        "mkernel.conformance.nic_faults.wrappers.library_of", lambda *_: str(tmp_path / "soft.so")
    )
    (row,) = planted.judge_one(f"{table}:MiscountedImmediate", ["visibility"], nics=True)
    assert row.caught is None
    assert f"({tmp_path}/libmkernel_planted_verbs.so): wheels leave it out" in row.message
    assert "run the command in a repository that `make` has built" in row.message
    assert not planted.passed([row])
    assert planted.passed([row, replace(row, caught=True)])
    assert not planted.passed([row, replace(row, caught=True), replace(row, caught=False)])


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
