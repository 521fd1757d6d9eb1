"""Mutation testing: does a test notice where the code is wrong?

    python tests/mutation/mutate.py MODULE [--sample N] [--seed S] [--jobs J] [--out FILE]

Draws mutants (mutants.py) of a module's lines (modules.py) and runs the tests that execute the
mutated line, fastest first, until one fails. Each worker has a copy of the tree in build/mutation,
which processes that tests start import too. What survives is listed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from coverage import Coverage

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from modules import MODULES, Module
from mutants import Mutant, mutants
from tree_copy import ROOT, copy_of_tree

_IMPORTED_ONCE = ("hypothesis", "numpy", "pydantic", "torch", "torch.distributed", "xdist")
"""By this process, for all that it forks: what takes long, and is not mutated."""
_SLACK = 5.0
"""So many times longer than it takes by itself, and this many seconds, a test may take."""
_SLACK_S = 20.0

Lines = dict[str, dict[int, list[str]]]
"""By file and line: the tests that execute it; lines that importing executes have none."""


def in_child(tree: Path, limit_s: float, body: Callable[[], int]) -> int | None:
    """What ``body`` returns in a process of its own that imports from ``tree``, and all that it starts;
    None: it did not end in time. Nothing of it is left."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            log = os.open(tree / "log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            for target, source in ((0, null), (1, log), (2, log)):
                os.dup2(source, target)
            os.chdir(tree)
            sys.path.insert(0, str(tree))
            os.environ.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1")
            sys.dont_write_bytecode = True
            os._exit(body())
        except BaseException:  # the process ends here, whatever comes
            os._exit(99)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _end_session(pid)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    _end_session(pid)
    os.waitpid(pid, 0)
    return None


def _end_session(leader: int) -> None:
    """End what is left of the session that ``leader`` leads, in whatever process groups."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(entry.name)) == leader:
                os.kill(int(entry.name), signal.SIGKILL)


def run_tests(ids: list[str], plugins: list[Any]) -> int:
    quiet = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"]
    return int(pytest.main([*quiet, *ids], plugins=plugins))


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


def baseline(tree: Path, module: Module, files: list[str]) -> tuple[Lines, dict[str, float]]:
    """Which tests execute which lines, and how long each takes. All of them pass."""
    result = tree / "baseline.json"

    def traced() -> int:
        tracer = _Tracer(files)
        tracer.coverage.start()
        code = run_tests(list(module.tests), [tracer])
        tracer.coverage.stop()
        result.write_text(json.dumps([tracer.lines(files), tracer.seconds]))
        return code

    code = in_child(tree, 1200, traced)
    if code != 0:
        print((tree / "log").read_text()[-3000:])
        raise SystemExit(f"the tests do not pass unmutated (exit {code})")
    lines, seconds = json.loads(result.read_text())
    found = {
        name: {int(line): tests for line, tests in of.items() if tests}
        for name, of in lines.items()
    }
    return found, seconds


def judges(mutant: Mutant, executed: dict[int, list[str]], seconds: dict[str, float]) -> list[str]:
    """The tests that execute the mutated lines, fastest first."""
    tests = {
        test for line in range(mutant.line, mutant.last_line + 1) for test in executed.get(line, [])
    }
    return sorted(tests, key=lambda test: seconds[test])


def outcome(
    tree: Path, name: str, mutant: Mutant, ids: list[str], further: list[str], limit_s: float
) -> str:
    """``killed``, ``killed by time`` or ``survived``."""
    path = tree / name
    source, times = path.read_text(), path.stat()
    try:
        path.write_text(mutant.applied(source))
        # Another time than any bytecode's, and than that of the mutant before.
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9 * (2 + mutant.start)))
        for tests, limit in ((ids, limit_s), (further, 600.0)):
            if not tests:
                continue
            code = in_child(tree, limit, lambda tests=tests: run_tests(tests, []))  # type: ignore[misc]
            if code is None:
                return "killed by time"
            if code != 0:
                return "killed"
        return "survived"
    finally:
        path.write_text(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def sample(
    files: list[str], lines: Lines, module: Module, count: int, seed: int
) -> tuple[list[tuple[str, Mutant]], int, int]:
    """Mutants to judge; of how many; how many lie where no test that is seen comes."""
    population, unseen = [], 0
    for name in files:
        for mutant in mutants((ROOT / name).read_text()):
            in_sight = any(line in lines[name] for line in range(mutant.line, mutant.last_line + 1))
            if in_sight or module.further:
                population.append((name, mutant))
            else:
                unseen += 1

    # The same mutants whatever else of the module changes: each is drawn by its own hash.
    def drawn(each: tuple[str, Mutant]) -> str:
        name, mutant = each
        return hashlib.sha256(f"{seed} {name} {mutant.line} {mutant}".encode()).hexdigest()

    return sorted(population, key=drawn)[:count], len(population), unseen


def work(
    tree: Path, module: Module, lines: Lines, seconds: dict[str, float], todo: Any, done: Any
) -> None:
    """One worker: judges mutants until there are none left."""
    while True:
        try:
            name, mutant = todo.get_nowait()
        except Empty:
            return
        ids = judges(mutant, lines[name], seconds)
        limit_s = _SLACK * sum(seconds[test] for test in ids) + _SLACK_S
        done.put(
            (
                name,
                mutant,
                len(ids),
                outcome(tree, name, mutant, ids, list(module.further), limit_s),
            )
        )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    arguments.add_argument("module", choices=sorted(MODULES))
    arguments.add_argument("--sample", type=int, default=100, help="mutants to judge")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--jobs", type=int, default=1)
    arguments.add_argument("--files", nargs="*", help="only these files of the module")
    arguments.add_argument("--out", type=Path, help="JSON of the outcomes")
    arguments.add_argument(
        "--further", action="store_true", help="also tests that start processes, of all lines"
    )
    given = arguments.parse_args()
    for each in _IMPORTED_ONCE:
        __import__(each)
    module = MODULES[given.module]
    if not given.further:
        module = replace(module, further=())
    files = [f for f in module.files(ROOT) if not given.files or f in given.files]
    trees = [ROOT / "build/mutation" / f"{given.module}{i}" for i in range(given.jobs)]
    for tree in trees:
        copy_of_tree(tree)
    lines, seconds = baseline(trees[0], module, files)
    chosen, population, unseen = sample(files, lines, module, given.sample, given.seed)
    print(
        f"{given.module}: {len(files)} files, {len(seconds)} tests; {len(chosen)} of {population} "
        f"mutants, seed {given.seed}; {unseen} more lie where none of these tests comes",
        flush=True,
    )
    todo: Any = Queue()
    done: Any = Queue()
    for one in chosen:
        todo.put(one)
    time.sleep(0.1)  # until the queue's thread has fed the first
    workers = []
    for tree in trees:
        pid = os.fork()
        if pid == 0:
            work(tree, module, lines, seconds, todo, done)
            done.close()
            done.join_thread()
            os._exit(0)
        workers.append(pid)
    counts: dict[str, int] = {}
    survivors = []
    start = time.monotonic()
    for _ in chosen:
        name, mutant, tests, how = done.get(timeout=1800)
        counts[how] = counts.get(how, 0) + 1
        if how == "survived":
            survivors.append({"at": f"{name}:{mutant.line}", "change": str(mutant), "tests": tests})
            print(f"  survived: {name}:{mutant.line} {mutant} ({tests} tests)", flush=True)
    for pid in workers:
        os.waitpid(pid, 0)
    print(f"{given.module}: {counts} in {time.monotonic() - start:.0f} s", flush=True)
    if given.out:
        survivors.sort(key=lambda each: str(each["at"]))
        head = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        report = {
            "module": given.module,
            "commit": commit.strip(),
            "seed": given.seed,
            "mutants": population,
            "where_no_test_comes": unseen,
            "judged": len(chosen),
            "outcomes": counts,
            "survivors": survivors,
        }
        given.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    for tree in trees:
        shutil.rmtree(tree, ignore_errors=True)


if __name__ == "__main__":
    main()
