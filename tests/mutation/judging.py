"""Whether tests notice a mutant: each time in a process that imports the mutated tree anew."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from coverage import Coverage

_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0")
_IMPORTING_S = 60.0

Lines = dict[str, dict[int, list[str]]]
"""By file and line: the tests that execute it; lines that importing executes have none."""


def in_child(tree: Path, limit_s: float, body: Callable[[], int]) -> int | None:
    """What ``body`` returns in a process of its own that imports from ``tree``, and all that it starts;
    None: it did not end in time. Nothing of it is left."""
    pid = os.fork()
    if pid == 0:
        _alone(tree, "log", body)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _end_session(pid)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    _end_session(pid)
    os.waitpid(pid, 0)
    return None


def _alone(tree: Path, log: str, body: Callable[[], int]) -> None:
    """Of a process that was just forked: leads a session, and ends with what ``body`` returns."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        told = os.open(tree / log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for target, source in ((0, null), (1, told), (2, told)):
            os.dup2(source, target)
        os.chdir(tree)
        if sys.path[0] != str(tree):
            sys.path.insert(0, str(tree))
        os.environ.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
        sys.dont_write_bytecode = True
        os._exit(body())
    except BaseException as error:  # the process ends here, whatever comes
        os.write(2, repr(error).encode())
        os._exit(99)


def _end_session(leader: int) -> None:
    """End what is left of the session that ``leader`` leads, in whatever process groups."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(entry.name)) == leader:
                os.kill(int(entry.name), signal.SIGKILL)


def run_anew(tree: Path, limits: dict[str, float]) -> str:
    """The outcome of tests, each within a limit in seconds, in a process that has imported nothing of
    the tree."""

    def body() -> int:
        return int(pytest.main([*_OPTIONS, *limits], [_Limits(limits)]))

    code = in_child(tree, sum(limits.values()) + _IMPORTING_S, body)
    if code is None or code == -signal.SIGALRM:
        return "killed by time"
    return "killed" if code else "survived"


class _Limits:
    """A pytest plugin that ends the process where a test takes longer than its limit."""

    def __init__(self, limits: dict[str, float]) -> None:
        self._limits = limits

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        signal.setitimer(signal.ITIMER_REAL, self._limits.get(item.nodeid, 0.0))
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def traced(tree: Path, tests: tuple[str, ...], files: list[str]) -> tuple[Lines, dict[str, float]]:
    """Which tests execute which lines, and how long each takes. All of them pass."""

    def body() -> int:
        tracer = _Tracer(files)
        code = int(pytest.main([*_OPTIONS, *tests], [tracer]))
        told = [tracer.lines(files), tracer.seconds]
        (tree / "traced.json").write_text(json.dumps(told))
        return code

    code = in_child(tree, 3600, body)
    if code != 0:
        print((tree / "log").read_text()[-3000:])
        raise SystemExit(f"the tests do not pass unmutated (exit {code})")
    lines, seconds = json.loads((tree / "traced.json").read_text())
    found = {
        name: {int(line): tests for line, tests in of.items() if tests}
        for name, of in lines.items()
    }
    return found, seconds


class _Tracer:
    """A pytest plugin that notes which lines each test executes, and how long it takes."""

    def __init__(self, files: list[str]) -> None:
        self.coverage = Coverage(data_file=None, include=files, concurrency=["thread"])
        self.seconds: dict[str, float] = {}

    def pytest_collection_finish(self) -> None:
        self.coverage.start()  # what importing executes is no test's

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.perf_counter() - start

    def lines(self, files: list[str]) -> dict[str, dict[int, list[str]]]:
        """By file and line: the tests."""
        data = self.coverage.get_data()
        found = {}
        for name in files:
            of = data.contexts_by_lineno(os.path.realpath(name))
            found[name] = {line: list(filter(None, tests)) for line, tests in of.items()}
        return found
