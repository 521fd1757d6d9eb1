"""Reports as table, JUnit XML and JSON."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mkernel.cli.terminal import Terminal
from mkernel.conformance import render
from mkernel.conformance.check import Check, Report, run_checks
from mkernel.errors import InputFileError
from mkernel.harness.outcome import CheckFailed, CheckSkipped


def fails(subject: str) -> None:
    raise CheckFailed(f"<{subject}> & \x00\x1b[31m is \N{SNOWMAN}\nsecond line")


def skips(_subject: str) -> None:
    raise CheckSkipped("not claimed: x")


def breaks(_subject: str) -> None:
    raise ValueError("no check's business") from KeyError("cause")


@pytest.fixture
def report() -> Report:
    checks = (
        Check("good", "it holds", lambda subject: None),
        Check("bad", "it holds too", fails),
        Check("odd", "it is claimed", skips),
        Check("broken", "it runs", breaks),
    )
    return run_checks("accelerator [x]", "x", checks)


def test_one_failure_fails_the_report(report: Report) -> None:
    outcomes = [result.outcome for result in report.results]
    assert outcomes == ["passed", "failed", "skipped", "failed"]
    assert not report.passed


@pytest.mark.parametrize("run", [skips, fails])
def test_nothing_that_passed_is_no_pass(run: object) -> None:
    assert not run_checks("x", "x", (Check("only", "p", run),)).passed  # type: ignore[arg-type]


def test_an_error_of_a_check_is_a_failure_with_its_cause(report: Report) -> None:
    assert report.results[3].message == "ValueError: no check's business ('cause')"


def test_junit_is_well_formed_whatever_was_said(report: Report) -> None:
    root = ElementTree.fromstring(render.junit(report))
    (suite,) = root
    assert suite.attrib["tests"] == "4"
    assert suite.attrib["failures"] == "2"
    assert suite.attrib["skipped"] == "1"
    cases = {case.attrib["name"]: case for case in suite}
    assert list(cases["good"]) == []
    failure = cases["bad"].find("failure")
    assert failure is not None
    assert failure.attrib["message"].startswith("<x> & ")
    assert "second line" in (failure.text or "")
    assert "\N{SNOWMAN}" in (failure.text or "")
    assert cases["odd"].find("skipped") is not None
    assert all(float(case.attrib["time"]) >= 0 for case in suite)


def test_json_round_trips_and_says_the_verdict(report: Report) -> None:
    found = json.loads(render.as_json(report))
    assert found.pop("passed") is False
    assert found.pop("seconds") >= 0
    assert Report.model_validate(found) == report


def test_the_table_shows_every_check_and_its_words(report: Report) -> None:
    console = Terminal(file=StringIO(), width=120)
    console.print(render.table(report), render.summary(report))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "FAILED (1 passed, 2 failed, 1 skipped" in text
    for word in ("good", "bad", "odd", "broken", "it holds", "not claimed: x", "[x]"):
        assert word in text


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="no/such"):
        render.write(tmp_path / "no" / "such", "x")
