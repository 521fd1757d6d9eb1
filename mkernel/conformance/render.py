"""Reports as a table, as JUnit XML and as JSON."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from rich.text import Text

from mkernel.conformance.check import Report, Result
from mkernel.errors import InputFileError
from mkernel.tabular import Column, Sheet
from mkernel.user_files import write_file

_COLOURS = {"passed": "green", "failed": "red", "skipped": "yellow"}
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SHOWN = 600


def summary(report: Report) -> str:
    """Summarise a report in one line: the verdict, counts and time."""
    outcomes = [result.outcome for result in report.results]
    counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))
    verdict = "PASSED" if report.passed else "FAILED"
    return f"{report.subject}: {verdict} ({counts}; {report.seconds:.1f} s)"


def table(report: Report) -> Sheet:
    """Draw a line for every check: outcome, time, and the reason if it did not pass."""
    drawn = Sheet(
        (
            Column("check", key=True),
            Column("outcome", key=True),
            Column("seconds", right=True),
            Column("promise, and how it was broken", prose=True),
        )
    )
    for result in report.results:
        drawn.row(
            result.name,
            Text(result.outcome, style=_COLOURS[result.outcome]),
            f"{result.seconds:.1f}",
            _words(result),
        )
    return drawn


def _words(result: Result) -> Text:
    if result.outcome == "passed":
        return Text(result.promise)
    said = result.message if len(result.message) <= _SHOWN else result.message[:_SHOWN] + " …"
    return Text.assemble(result.promise, "\n", (said, _COLOURS[result.outcome]))


def junit(report: Report) -> str:
    """Render a report as JUnit XML: one suite, a test case for every check."""
    outcomes = [result.outcome for result in report.results]
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name=_xml(f"mkernel conformance: {report.subject}"),
        tests=str(len(outcomes)),
        failures=str(outcomes.count("failed")),
        skipped=str(outcomes.count("skipped")),
        errors="0",
        time=f"{report.seconds:.3f}",
    )
    for result in report.results:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=_xml(f"mkernel.conformance.{report.subject}"),
            name=_xml(result.name),
            time=f"{result.seconds:.3f}",
        )
        if result.outcome == "failed":
            first = result.message.partition("\n")[0]
            failure = ElementTree.SubElement(case, "failure", message=_xml(first))
            failure.text = _xml(f"{result.promise}\n{result.message}")
        elif result.outcome == "skipped":
            ElementTree.SubElement(case, "skipped", message=_xml(result.message))
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, "us-ascii", xml_declaration=True)  # fits any terminal
    return text.decode() + "\n"


def as_json(report: Report) -> str:
    """Render a report as one JSON object, with its verdict."""
    whole = {"passed": report.passed, "seconds": report.seconds, **report.model_dump(mode="json")}
    import json

    return json.dumps(whole, indent=2)


def write(path: Path, text: str) -> None:
    """Write a report file. Raises InputFileError if it cannot be written."""
    try:
        write_file(path, text)
    except OSError as error:
        raise InputFileError(f"{path}: cannot be written: {error.strerror}") from error


def _xml(text: str) -> str:
    """Replace the characters that XML 1.0 does not allow."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
