"""Every row of the page of limits names tests, and these exist."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from pages import ROOT

PAGE = (ROOT / "docs" / "limits.md").read_text()
ROWS = [
    line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| what |")
]
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def functions(path: str) -> frozenset[str]:
    """Names of a file's tests; empty where there is no such file."""
    file = ROOT / path
    tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
    return frozenset(each.name for each in tree.body if isinstance(each, ast.FunctionDef))


def missing(row: str) -> list[str]:
    """What is wrong with the tests that a row names."""
    named = _TEST.findall(row.rstrip(" |").rpartition("|")[2])
    return [f"{path} has no {test}" for path, test in named if test not in functions(path)] or (
        [] if named else ["names no test"]
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_row_names_tests_that_exist(row: str) -> None:
    assert missing(row) == []


def test_tests_in_the_text_exist_too() -> None:
    for path, test in _TEST.findall(PAGE):
        assert test in functions(path), f"{path} has no {test}"


def test_what_is_missing_is_noticed() -> None:
    """A planted row each: without a test, with one that is gone, in a file that is gone."""
    assert len(ROWS) > 20
    assert missing("| signals | 8 | refused | |") == ["names no test"]
    here = "tests/docs/test_limits_page.py"
    assert missing(f"| signals | 8 | | `{here}::test_gone` |") == [f"{here} has no test_gone"]
    assert missing("| signals | 8 | | `tests/gone.py::test_a` |") == ["tests/gone.py has no test_a"]
