"""The repository's root is a place to work in: what stands there is what is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", "import mkernel.backends.runtime._runtime, mkernel.topology"),
        ("-m", "mkernel", "--version"),
        ("-m", "pytest", "--collect-only", "-q", "tests/unit/test_errors.py"),
    ],
    ids=["import", "mkernel", "pytest"],
)
def test_python_works_in_the_root(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_names_of_test_files_are_unique() -> None:
    """pytest imports them by their names alone; of two with one name it refuses the second."""
    names = [file.name for file in (ROOT / "tests").rglob("*.py") if file.name != "conftest.py"]
    assert sorted(set(names)) == sorted(names)
