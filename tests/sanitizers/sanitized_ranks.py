"""Tests of ranks, each a process with Python and torch, on native code that a sanitizer watches.

    python tests/sanitizers/sanitized_ranks.py address|thread [--report] [TEST or option of pytest...]

``make sanitize-ranks`` builds first. A copy of the tree in build/sanitize-WHICH/tree has the modules
that were built with the sanitizer; its runtime is loaded ahead of Python. Returns 1 where a test fails
or the sanitizer reports something, whatever a test made of it: every process writes a file of its own.
Python and torch are not built so: what they do is seen only where it meets our code, or memory that our
code has, and what they leak is theirs. ``--report`` writes what came of it, by sanitizer and file, to
bench/results/sanitized_ranks.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1]))

from tree_copy import ROOT, copy_of_tree

TESTS = (
    "tests/multiprocess/test_only_through_the_nic.py",
    "tests/multiprocess/test_over_efa.py",
    "tests/multiprocess/test_known_calls.py",
    "tests/multiprocess/test_symmetric_memory.py",
    "tests/multiprocess/test_worlds_side_by_side.py",
    "tests/multiprocess/test_growth.py",
    "tests/faults/test_broken_worlds.py",
    "tests/conformance/test_accelerators.py",
    "tests/conformance/test_nic.py",
)
"""Every native module that runs without a GPU, over both NICs, and ranks that are killed."""
TEST_S = 1800
"""How long one test may take, some times as long as without a sanitizer."""
RUNTIMES = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
OPTIONS = {
    # Leaks are not looked for: Python and torch keep much to the end.
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Ranks are forks of one server; a report must not hide what comes after it.
    "TSAN_OPTIONS": "die_after_fork=0:halt_on_error=0:report_signal_unsafe=0",
}
SUPPRESSIONS = Path(__file__).parent / "thread.txt"
# Reads what was freed: either sanitizer must say so, or it does not watch.
PLANTED = """
import ctypes
from mkernel.backends.transport import _transport
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
pad = libc.malloc(_transport.pad_bytes(8))
_transport.pad_format(pad, 8)
libc.free(pad)
_transport.pad_load(pad, 0)
"""


def runtime(name: str) -> str:
    """The path of a sanitizer's runtime, as the compiler has it."""
    told = subprocess.run(
        [os.environ.get("CXX", "g++"), f"-print-file-name={name}"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    return str(Path(told).resolve(strict=True))


def environment(which: str, tree: Path, reports: Path) -> dict[str, str]:
    """Of every process of a run; ``reports``: where each writes what it found."""
    options = {name: f"{told}:log_path={reports}/report" for name, told in OPTIONS.items()}
    options["TSAN_OPTIONS"] += f":suppressions={SUPPRESSIONS}"
    return {
        **os.environ,
        **options,
        "LD_PRELOAD": " ".join(map(runtime, RUNTIMES[which])),
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",  # a world has more threads; none may spin on a busy machine
    }


def run(command: list[str], tree: Path, told: dict[str, str]) -> int:
    """Its return code. Without randomised addresses, which older runtimes of TSan do not take."""
    return subprocess.run(["setarch", "-R", *command], cwd=tree, env=told, check=False).returncode


def outcomes(junit: Path) -> dict[str, Counter[str]]:
    """How many tests of each file passed, failed or were skipped."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for case in ElementTree.parse(junit).iter("testcase"):
        how = {child.tag for child in case}
        kind = (
            "failed" if how & {"failure", "error"} else "skipped" if "skipped" in how else "passed"
        )
        found[case.attrib["classname"].replace(".", "/") + ".py"][kind] += 1
    return found


def report(which: str, tests: dict[str, Counter[str]], reports: int, *, whole: bool) -> None:
    """Write the summary; what runs of parts say is added to it."""
    sys.path.append(str(ROOT / "bench"))
    import results_file

    name = "sanitized_ranks"
    known = (results_file.RESULTS / f"{name}.json").exists()
    figures = results_file.read(name)["figures"] if known else {}
    before = [] if whole else figures.get(which, [])
    told = {file: dict(sorted(counts.items())) for file, counts in sorted(tests.items())}
    figures[which] = [*before, {"tests": told, "reports": reports}]
    results_file.write(name, figures)


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("which", choices=RUNTIMES)
    parser.add_argument(
        "--report", action="store_true", help="write what came of it to bench/results"
    )
    given, told_pytest = parser.parse_known_args()
    build = ROOT / "build" / f"sanitize-{given.which}"
    tree, reports = build / "tree", build / "reports"
    copy_of_tree(tree, built=False)
    install = ["cmake", "--install", str(build), "--prefix", str(tree)]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    told = environment(given.which, tree, reports)

    planted = [sys.executable, "-c", PLANTED]
    run(planted, tree, told)
    found = list(reports.iterdir())
    if not any("heap-use-after-free" in each.read_text() for each in found):
        print(f"{given.which}: memory that was freed was read, and nothing was reported")
        return 1
    for each in found:
        each.unlink()

    pytest = [sys.executable, "-m", "pytest", "-q", "--timeout", str(TEST_S)]
    junit = build / "tests.xml"
    status = run([*pytest, f"--junitxml={junit}", *(told_pytest or TESTS)], tree, told)
    if given.report:
        found = len(list(reports.iterdir()))
        report(given.which, outcomes(junit), found, whole=not told_pytest)
    for each in sorted(reports.iterdir()):
        print(f"== {each.name}", each.read_text(), sep="\n")
    print(f"{given.which}: pytest {status}, {len(list(reports.iterdir()))} reports")
    return int(status != 0 or any(reports.iterdir()))


if __name__ == "__main__":
    sys.exit(main())
