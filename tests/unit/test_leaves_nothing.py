"""The fixture that fails a test which left something behind, in a session of its own."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from in_world import DEADLINE_S

_TESTS = """
import sys, time
from pathlib import Path
import pytest
conftest = sys.modules["conftest"]
pytestmark = pytest.mark.usefixtures("leaves_nothing")

def test_others_memory_appears():
    Path("ready").touch()
    deadline = time.monotonic() + conftest._PATIENCE_S
    while not Path("mapped").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)

def test_memory_is_left():
    conftest._PATIENCE_S = 1  # only here: the test before may have to wait for another session's file
    Path("/dev/shm/{name}").touch()
"""


@pytest.fixture
def shared_name() -> Iterator[str]:
    name = f"mkernel-test-{os.getpid()}"
    yield name
    for left in Path("/dev/shm").glob(f"{name}*"):
        left.unlink()


def test_what_a_session_leaves_is_told_from_what_another_uses(
    tmp_path: Path, shared_name: str
) -> None:
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "test_inner.py").write_text(_TESTS.format(name=shared_name))
    others = Path("/dev/shm", f"{shared_name}-others")
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_inner.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    ) as session:  # fmt: skip
        while not (tmp_path / "ready").exists():
            assert session.poll() is None, "the session ended before its first test"
            time.sleep(0.01)
        others.write_bytes(bytes(mmap.PAGESIZE))
        with others.open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE):
            (tmp_path / "mapped").touch()
            said = session.communicate(timeout=DEADLINE_S)[0]
    errors = re.findall(r"ERROR test_inner.py::(\w+)", said)
    assert errors == ["test_memory_is_left"], said
    assert "2 passed" in said
    assert "shared memory segments are left" in said
