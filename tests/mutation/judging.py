"""Whether tests notice a mutant: in forks of a process that has collected them, then in new imports."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage
from in_place import Functions
from mutants import Mutant

_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0")
_NOT_IN_PLACE = 98
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

    return _outcome(in_child(tree, sum(limits.values()) + _IMPORTING_S, body))


def _outcome(code: int | None) -> str:
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


class Collected:
    """A process that has imported and collected tests. Each mutant is judged in a fork of it, where it
    replaces the code of functions: what a mutant costs is then its tests alone.

    ``files``: those that are mutated. What importing and collecting execute of them is not judged so:
    what they made of it is there already.
    """

    def __init__(self, tree: Path, tests: tuple[str, ...], files: list[str]) -> None:
        self._tree, self._files = tree, files
        self._pipe, theirs = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._pipe.close()
            options = [*_OPTIONS, "-s", f"--basetemp={tree}/tests.tmp", *tests]
            _alone(tree, "collected", lambda: _Server(tree, theirs, files).serve(options))
        theirs.close()

    def traced(self) -> tuple[Lines, dict[str, float]]:
        """Which tests execute which lines, and how long each takes. All of them pass."""
        code = self._ask("traced")
        if code != 0:
            print((self._tree / "log").read_text()[-3000:])
            raise SystemExit(f"the tests do not pass unmutated (exit {code})")
        lines, seconds = json.loads((self._tree / "traced.json").read_text())
        found = {
            name: {int(line): tests for line, tests in of.items() if tests}
            for name, of in lines.items()
        }
        return found, seconds

    def judge(self, name: str, mutant: Mutant, limits: dict[str, float]) -> str | None:
        """The outcome of tests, each within a limit in seconds; None: it takes new imports."""
        code = self._ask("judged", name, mutant, limits)
        return None if code == _NOT_IN_PLACE else _outcome(code)

    def _ask(self, *asked: Any) -> int | None:
        self._pipe.send(asked)
        try:
            answer: int | None = self._pipe.recv()
        except EOFError:
            print((self._tree / "collected").read_text()[-3000:])
            raise SystemExit("the tests cannot be collected") from None
        return answer

    def close(self) -> None:
        """End the process."""
        # To close the pipe says nothing while a process that was forked later has a copy of this end.
        self._pipe.send(None)
        os.waitpid(self._pid, 0)
        self._pipe.close()


class _Server:
    """A pytest plugin that answers a :class:`Collected` instead of running what was collected."""

    def __init__(self, tree: Path, pipe: Any, files: list[str]) -> None:
        self._tree, self._pipe, self._files = tree, pipe, files
        self._sources = {name: (tree / name).read_text() for name in files}
        self._importing = Coverage(data_file=None, include=files)

    def serve(self, options: list[str]) -> int:
        """Collect tests and answer; pytest's exit code."""
        self._importing.start()
        return int(pytest.main(options, [self]))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._importing.stop()
        data = self._importing.get_data()
        self._imported = {
            name: set(data.lines(os.path.realpath(name)) or ()) for name in self._files
        }
        self._session = session
        self._items = {item.nodeid: item for item in session.items}
        self._functions = Functions()
        gc.collect()
        gc.freeze()  # what forks share is not written to
        with contextlib.suppress(EOFError):
            while asked := self._pipe.recv():
                name, *arguments = asked
                self._pipe.send(getattr(self, f"_{name}")(*arguments))
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(report.nodeid, report.longreprtext, flush=True)

    def _traced(self) -> int | None:
        def body() -> int:
            tracer = _Tracer(self._files)
            self._session.config.pluginmanager.register(tracer)
            tracer.coverage.start()
            code = self._run(list(self._items))
            tracer.coverage.stop()
            told = [tracer.lines(self._files), tracer.seconds]
            (self._tree / "traced.json").write_text(json.dumps(told))
            return code

        return in_child(self._tree, 3600, body)

    def _judged(self, name: str, mutant: Mutant, limits: dict[str, float]) -> int | None:
        if self._imported[name].intersection(mutant.lines):
            return _NOT_IN_PLACE
        source = self._sources[name]

        def body() -> int:
            if not self._functions.replace(name, source, mutant.applied(source)):
                return _NOT_IN_PLACE
            self._session.config.pluginmanager.register(_Limits(limits))
            return self._run(list(limits))

        return in_child(self._tree, sum(limits.values()) + _IMPORTING_S, body)

    def _run(self, tests: list[str]) -> int:
        """0 or 1: a test failed, the last that was run."""
        items = [self._items[test] for test in tests]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._session.testsfailed:
                return 1
        return 0


class _Tracer:
    """A pytest plugin that notes which lines each test executes, and how long it takes."""

    def __init__(self, files: list[str]) -> None:
        self.coverage = Coverage(data_file=None, include=files, concurrency=["thread"])
        self.seconds: dict[str, float] = {}

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
