"""The file that `pytest tests/gpu --gpu-report FILE` writes; here of tests that need no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mkernel.harness import gpu_tests

ROOT = Path(__file__).parents[3]
HELPERS = os.pathsep.join(str(ROOT / folder) for folder in ("tests", "tests/gpu"))
TESTS = """
import pytest

def test_passes(): pass
def test_passes_too(): pass
def test_fails(): assert False
@pytest.mark.skip(reason="needs 9 GPU(s)")
def test_is_skipped(): pass
@pytest.mark.skip(reason="needs 9 GPU(s)")
def test_is_skipped_too(): pass
@pytest.mark.xfail
def test_is_expected_to_fail(): assert False
@pytest.fixture
def broken(): raise RuntimeError
def test_has_no_setup(broken): pass
"""


def pytest_with_report(
    folder: Path, *arguments: str, more: str = "", **environment: str
) -> gpu_tests.TestRuns:
    (folder / "conftest.py").write_text((ROOT / "tests/gpu/conftest.py").read_text())
    (folder / "test_some.py").write_text(TESTS + more)
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--gpu-report", "found.json", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": HELPERS, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = gpu_tests.read(folder / "found.json")
    assert found is not None, done.stdout + done.stderr
    return found


def test_a_run_that_is_killed_leaves_what_is_known_by_then(tmp_path: Path) -> None:
    killed = "\n\ndef test_zz_ends_by_force():\n    import os; os.kill(os.getpid(), 9)\n"
    (run,) = pytest_with_report(tmp_path, "test_some.py", "--commit", "c" * 40, more=killed).runs
    assert run.cut_off
    assert run.failures == ("test_some.py::test_fails", "test_some.py::test_has_no_setup")
    told = (tmp_path / "found.failures.txt").read_text()
    assert all(f"{each}\n" in told for each in run.failures)
    assert told.count("Error") >= len(run.failures)
    (line,) = (
        line for line in gpu_tests.section(gpu_tests.TestRuns(runs=(run,))) if "pytest" in line
    )
    assert line.endswith("**cut off** before its end.")


@pytest.mark.parametrize(
    ("more", "arguments"),
    [("", ("--maxfail", "1")), ("\n\ndef test_zz_is_interrupted(): raise KeyboardInterrupt\n", ())],
    ids=["maxfail", "interrupt"],
)
def test_a_run_that_is_stopped_says_so(
    tmp_path: Path, more: str, arguments: tuple[str, ...]
) -> None:
    (run,) = pytest_with_report(
        tmp_path, "test_some.py", *arguments, "--commit", "c" * 40, more=more
    ).runs
    assert run.cut_off


def test_counts_skips_and_failures_are_written(tmp_path: Path) -> None:
    (run,) = pytest_with_report(tmp_path, "test_some.py", "--commit", "c" * 40).runs
    assert run.counts == {"passed": 2, "failed": 1, "skipped": 2, "xfailed": 1, "error": 1}
    assert run.skips == {"needs 9 GPU(s)": 2}
    assert run.failures == ("test_some.py::test_fails", "test_some.py::test_has_no_setup")
    assert run.selection == ("test_some.py",)
    assert run.ranks_per_device == 1
    assert not run.cut_off
    assert run.provenance["commit"] == "c" * 40
    assert run.provenance["commit_from"] == "asserted"
    assert run.provenance["dirty"] is None
    assert run.provenance["hardware"]["device"] in ("cpu", "cuda")
    chosen = ("test_some.py", "-k", "passes", "-m", "not xfail")
    found = pytest_with_report(
        tmp_path, *chosen, "--commit", "c" * 40, MKERNEL_RANKS_PER_DEVICE="2"
    )  # what is chosen otherwise is a run of its own
    assert [each.counts["passed"] for each in found.runs] == [2, 2]
    assert found.runs[1].selection == chosen
    assert found.runs[1].ranks_per_device == 2


def test_a_stopped_run_goes_on_with_the_rest(tmp_path: Path) -> None:
    """A test that fails is left out, too: it has run, and its failure stays in the report."""
    chosen = ("test_some.py", "-k", "not setup", "--commit", "c" * 40)
    (stopped,) = pytest_with_report(tmp_path, *chosen, "--maxfail", "1").runs
    assert stopped.cut_off
    assert stopped.counts == {"passed": 2, "failed": 1}
    (whole,) = pytest_with_report(tmp_path, *chosen, "--rest").runs
    assert not whole.cut_off
    assert whole.counts == {"passed": 2, "failed": 1, "skipped": 2, "xfailed": 1}
    assert whole.failures == ("test_some.py::test_fails",)
    (again,) = pytest_with_report(tmp_path, *chosen[:-1], "d" * 40, "--rest").runs
    assert again.counts == whole.counts, "another commit begins anew"
