"""The programs of docs/from-nccl.md run as they are written: the first, and what diffs make of it."""

from __future__ import annotations

import re
from pathlib import Path

import forked_program
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "from-nccl.md"

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def patched(program: str, diff: str) -> str:
    """A program after a diff, each of whose hunks fits at one place. Hunks have no line numbers."""
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        assert all(line[0] in " +-" for line in lines), hunk
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        assert f"\n{program}".count(f"\n{old}") == 1, old
        program = f"\n{program}".replace(f"\n{old}", f"\n{new}")[1:]
    return program


def programs() -> list[str]:
    """The page's program, after no diff, one, two, ..."""
    page = PAGE.read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    found = [program]
    for diff in re.findall(r"^```diff\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        found.append(patched(found[-1], diff))
    return found


STEPS = ["collectives", "ops", "layers", "styles", "compiler"]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_computes_what_one_rank_does(step: str, tmp_path: Path) -> None:
    written = programs()
    assert len(written) == len(STEPS)
    script = tmp_path / "program.py"
    script.write_text(written[STEPS.index(step)])
    code, said = forked_program.run(script)
    assert code == 0, said
    errors = re.findall(r"rank (\d): differs by ([-+.e0-9]+)", said)
    assert sorted(rank for rank, _ in errors) == ["0", "1"], said
    assert max(float(error) for _, error in errors) <= 1e-5
    if step in STEPS[2:]:
        assert said.count("a gradient of [512, 256]") == 2
    if step == "compiler":
        promised = re.search(r"^It prints (.*)\.$", PAGE.read_text(), re.MULTILINE)
        assert promised is not None
        for line in re.findall(r"`(.+?)`", promised[1]):
            assert line in said


def test_a_hunk_that_fits_nowhere_is_no_step() -> None:
    with pytest.raises(AssertionError):
        patched("a = 1\n", "-a = 2\n+a = 3\n")
    assert patched("a = 1\nb = 2\n", " a = 1\n-b = 2\n+b = 3\n") == "a = 1\nb = 3\n"
