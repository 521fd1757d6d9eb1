"""When a planted fault counts as caught."""

from __future__ import annotations

import pytest

from mkernel.conformance import planted
from mkernel.conformance.check import Check
from mkernel.conformance.kit import Kit
from mkernel.errors import ShapeError, Unsupported
from mkernel.harness.outcome import CheckFailed, CheckSkipped, HarnessError


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
    def run(subject: object) -> None:
        if error is not None:
            raise error

    kit = Kit("a kit", None, (Check("shapes", "every shape", run),))
    monkeypatch.setattr(planted, "kit_for", lambda *arguments, **options: kit)
    (row,) = planted.judge_one("mkernel.conformance.faults:Fault", ["shapes"])
    assert row.caught == caught, row.message
