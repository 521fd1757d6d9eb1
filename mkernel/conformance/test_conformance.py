"""One test a check: ``pytest --pyargs mkernel.conformance --accelerator NAME`` (or ``--nic NAME``)."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from mkernel.conformance.check import Check, run_check
from mkernel.conformance.kit import Kit, kit_for
from mkernel.errors import MkernelError


@functools.cache
def _kit(
    accelerator: str | None, nic: str | None, verbs: str | None, quick: bool, seed: int
) -> Kit:
    return kit_for(accelerator, nic, verbs=verbs, quick=quick, seed=seed)


def _session_kit(config: pytest.Config) -> Kit:
    names = ("accelerator", "nic", "verbs", "quick", "seed")
    try:
        return _kit(*(config.getoption(name) for name in names))
    except (MkernelError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each check of the backend that the command line names."""
    if "check" in metafunc.fixturenames:
        checks = _session_kit(metafunc.config).checks
        metafunc.parametrize("check", checks, ids=[check.name for check in checks])


def test_promise(check: Check, pytestconfig: pytest.Config) -> None:
    """The backend keeps the check's promise."""
    result: Any = run_check(check, _session_kit(pytestconfig).subject)
    if result.outcome == "skipped":
        pytest.skip(result.message)
    if result.outcome == "failed":
        pytest.fail(f"{check.name}: {check.promise}\n{result.message}", pytrace=False)
