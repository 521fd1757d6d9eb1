"""Checks, their results, and the functions that run them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from mkernel.harness.outcome import CheckFailed, CheckSkipped
from mkernel.topology.model import Model

OutcomeKind = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """One promise and its test.

    Attributes:
        name: short and stable (``stale-data``): reports, planted faults and exit codes refer to it.
        promise: the sentence that must hold.
        run: takes the kind's subject (which backend, which options); raises CheckFailed or
            CheckSkipped. Any other exception counts as a failure, with its text.
    """

    name: str
    promise: str
    run: Callable[[Any], None]


class Result(Model):
    """The outcome of one check. ``raised`` is the type of the error that ended it, if it did not
    come to a judgement of its own."""

    name: str
    promise: str
    outcome: OutcomeKind
    seconds: float
    message: str = ""
    raised: str = ""


class Report(Model):
    """The outcome of a backend's checks. ``subject`` is its kind and name, and the provider of a
    NIC."""

    subject: str
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Return whether no check failed and at least one passed."""
        outcomes = {result.outcome for result in self.results}
        return "failed" not in outcomes and "passed" in outcomes

    @property
    def seconds(self) -> float:
        """Return the time of all checks, in seconds."""
        return sum(result.seconds for result in self.results)


def run_check(check: Check, subject: Any) -> Result:
    """Run one check; whatever it raises becomes its result (but not KeyboardInterrupt)."""
    start = time.perf_counter()
    outcome: OutcomeKind = "passed"
    message = raised = ""
    try:
        check.run(subject)
    except CheckSkipped as skipped:
        outcome, message = "skipped", str(skipped)
    except CheckFailed as failed:
        outcome, message = "failed", str(failed)
    except Exception as error:
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        outcome, raised = "failed", type(error).__name__
        message = f"{raised}: {error}{cause}"
    return Result(
        name=check.name,
        promise=check.promise,
        outcome=outcome,
        seconds=time.perf_counter() - start,
        message=message,
        raised=raised,
    )


def run_checks(
    subject_name: str,
    subject: Any,
    checks: Iterable[Check],
    on_result: Callable[[Result], None] = lambda result: None,
) -> Report:
    """Run checks one after another, and report on each as soon as it ends."""
    results = []
    for check in checks:
        result = run_check(check, subject)
        on_result(result)
        results.append(result)
    return Report(subject=subject_name, results=tuple(results))
