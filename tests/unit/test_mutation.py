"""Mutation testing's own parts (tests/mutation): mutants in their places, and who notices them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MUTATION = Path(__file__).parents[1] / "mutation"
SOURCE = """
from functools import cache

LIMIT = 4


def doubled(x):
    return x * 2


class Counter:
    def __init__(self, first=1):
        self.count = first

    def outer(self, much):
        def inner(x):
            return [each + much for each in x]
        return inner([self.count])


TABLE = [doubled(3)]


def unnoticed(x):
    while x < 0:
        x += 1
    return x
"""
TESTS = """
from code_to_mutate import TABLE, Counter, unnoticed


def test_outer():
    assert Counter().outer(3) == [4]


def test_table():
    assert TABLE == [6]


def test_unnoticed():
    assert unnoticed(-1) < 9
"""
JUDGED = """
import sys
from pathlib import Path
import hypothesis, xdist  # once, for all that is forked
sys.path.insert(0, sys.argv[1])
from judging import traced
from mutants import mutants
from mutate import outcome
tree = Path.cwd()
name = "code_to_mutate.py"
lines, seconds = traced(tree, ("test_it.py",), [name])
for mutant in mutants((tree / name).read_text()):
    tests = sorted({test for line in mutant.lines for test in lines[name].get(line, [])})
    if tests:
        print(mutant, "|", outcome(tree, name, mutant, dict.fromkeys(tests, 3.0), ()))
"""


@pytest.mark.slow
def test_each_mutant_is_judged_by_the_tests_that_execute_it(tmp_path: Path) -> None:
    (tmp_path / "code_to_mutate.py").write_text(SOURCE)
    (tmp_path / "test_it.py").write_text(TESTS)
    told = subprocess.run(
        [sys.executable, "-c", JUDGED, str(MUTATION)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    assert dict(line.split(" | ") for line in told.stdout.splitlines()) == {
        "`return inner([self.count])` → `return None`": "killed",
        "`return [each + much for each in x]` → `return None`": "killed",
        "`each + much` → `(each - much)`": "killed",
        "`x < 0` → `(x <= 0)`": "survived",
        "`x += 1` → `pass`": "killed by time",
        "`x += 1` → `x -= 1`": "killed by time",
        "`0` → `(1)`": "survived",
        "`1` → `(2)`": "survived",
        "`return x` → `return None`": "killed",
    }


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MUTATION))


@pytest.mark.usefixtures("parts")
def test_lines_behind_a_mutant_keep_their_numbers() -> None:
    from mutants import mutants

    source = textwrap.dedent("""
        def found(x):
            some = max(
                x,
                3,
            ) + 1
            return some
    """)
    for mutant in mutants(source):
        assert mutant.applied(source).splitlines()[5:] == source.splitlines()[5:] or (
            mutant.last_line >= 6
        )
        compile(mutant.applied(source), "here.py", "exec")


@pytest.mark.usefixtures("parts")
def test_a_seed_draws_one_sequence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import mutate
    from modules import Module

    (tmp_path / "code_to_mutate.py").write_text(SOURCE)
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    every = {"code_to_mutate.py": {line: ["a test"] for line in range(40)}}
    module = Module(("*.py",), ())
    whole, _ = mutate.drawn(["code_to_mutate.py"], every, module, 1)
    again, _ = mutate.drawn(["code_to_mutate.py"], every, module, 1)
    other, _ = mutate.drawn(["code_to_mutate.py"], every, module, 2)
    assert whole == again
    assert whole != other
    assert len(whole) == len({id(each) for each in whole}) > 10
