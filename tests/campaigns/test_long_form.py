"""The long form: what its summary says of steps that pass, fail and hang."""

from __future__ import annotations

import pytest
from campaigns import long_form


def test_its_steps_take_an_hour_and_a_half_at_most() -> None:
    assert sum(most_s for _, most_s in long_form.STEPS) <= 5400


@pytest.mark.parametrize(
    ("command", "most_s", "passed"),
    [("true", 60, True), ("false", 60, False), ("sleep 60", 0.1, False)],
)
def test_a_step_that_fails_or_hangs_has_not_passed(
    command: str, most_s: float, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_form, "STEPS", ((command, most_s),))
    told = long_form.run(command, most_s)
    assert told["passed"] is passed
    assert ("ended_after_s" in told) == (command == "sleep 60")
    assert long_form.summary([told])["passed"] is passed
    assert long_form.summary([])["passed"] is False
