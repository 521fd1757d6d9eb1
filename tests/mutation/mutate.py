"""Mutation testing: does a test notice where the code is wrong?

    python tests/mutation/mutate.py MODULE [--sample N] [--from N] [--seed S] [--jobs J] [--out FILE]

Draws mutants (mutants.py) of a module's lines (modules.py) and runs the tests that execute the
mutated line, fastest first, until one fails (judging.py). Each worker has a copy of the tree in
build/mutation, which processes that tests start import too. What survives is listed. A seed draws one
sequence of the mutants of a commit: ``--from 100`` goes on behind the first hundred of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import Queue
from pathlib import Path
from queue import Empty
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from judging import Lines, run_anew, traced
from modules import MODULES, Module
from mutants import Mutant, mutants
from tree_copy import ROOT, copy_of_tree

_IMPORTED_ONCE = ("hypothesis", "numpy", "pydantic", "torch", "torch.distributed", "xdist")
"""By this process, for all that it forks: what takes long, and is not mutated."""
_SLACK = 5.0
"""So many times longer than it takes by itself, and this many seconds, a test may take."""
_SLACK_S = 20.0
_FURTHER_S = 300.0
"""A file of tests that start processes."""


def judges(mutant: Mutant, executed: dict[int, list[str]], seconds: dict[str, float]) -> list[str]:
    """Those of the tests with ``seconds`` that execute the mutated lines, fastest first."""
    tests = {test for line in mutant.lines for test in executed.get(line, [])}
    return sorted(tests & seconds.keys(), key=lambda test: seconds[test])


def outcome(
    tree: Path,
    name: str,
    mutant: Mutant,
    limits: dict[str, float],
    further: tuple[str, ...],
) -> str:
    """``killed``, ``killed by time`` or ``survived``."""
    path = tree / name
    source, times = path.read_text(), path.stat()
    try:
        path.write_text(mutant.applied(source))
        # Another time than any bytecode's, and than that of the mutant before.
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9 * (2 + mutant.start)))
        how = run_anew(tree, limits) if limits else "survived"
        if how == "survived" and further:
            how = run_anew(tree, dict.fromkeys(further, _FURTHER_S))
        return how
    finally:
        path.write_text(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def drawn(
    files: list[str], lines: Lines, module: Module, seed: int
) -> tuple[list[tuple[str, Mutant]], int]:
    """All mutants that can be judged, in the order in which a seed draws them; and how many lie where
    no test that is seen comes."""
    population, unseen = [], 0
    for name in files:
        for mutant in mutants((ROOT / name).read_text()):
            in_sight = any(line in lines[name] for line in mutant.lines)
            if in_sight or module.further:
                population.append((name, mutant))
            else:
                unseen += 1

    # The same mutants whatever else of the module changes: each is drawn by its own hash.
    def lot(each: tuple[str, Mutant]) -> str:
        name, mutant = each
        return hashlib.sha256(f"{seed} {name} {mutant.line} {mutant}".encode()).hexdigest()

    return sorted(population, key=lot), unseen


def work(
    tree: Path,
    module: Module,
    lines: Lines,
    seconds: dict[str, float],
    todo: Any,
    done: Any,
) -> None:
    """One worker: judges mutants until there are none left."""
    while True:
        try:
            name, mutant = todo.get_nowait()
        except Empty:
            return
        ids = judges(mutant, lines[name], seconds)
        limits = {test: _SLACK * seconds[test] + _SLACK_S for test in ids}
        how = outcome(tree, name, mutant, limits, module.further)
        done.put((name, mutant, len(ids), how))


def judged(
    chosen: list[tuple[str, Mutant]],
    trees: list[Path],
    module: Module,
    lines: Lines,
    seconds: dict[str, float],
) -> Iterator[tuple[str, Mutant, int, str]]:
    """(file, mutant, how many tests judged it, outcome), as workers, one a tree, come to them."""
    todo: Any = Queue()
    done: Any = Queue()
    for one in chosen:
        todo.put(one)
    time.sleep(0.1)  # until the queue's thread has fed the first
    pids = []
    for tree in trees:
        pid = os.fork()
        if pid == 0:
            work(tree, module, lines, seconds, todo, done)
            done.close()
            done.join_thread()
            os._exit(0)
        pids.append(pid)
    for _ in chosen:
        yield done.get(timeout=1800)
    for pid in pids:
        os.waitpid(pid, 0)


def _commit() -> str:
    head = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@dataclass
class Report:
    """What was judged: ``judged`` mutants of the seed's sequence, from number ``first`` on."""

    module: str
    seed: int
    first: int
    mutants: int
    where_no_test_comes: int
    judged: int = 0
    seconds: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    survivors: list[dict[str, str | int]] = field(default_factory=list)
    commit: str = field(default_factory=_commit)

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    def add(self, name: str, mutant: Mutant, tests: int, how: str) -> None:
        """One more outcome; survivors are printed."""
        self.judged += 1
        self.seconds = round(time.monotonic() - self._began)
        self.outcomes[how] = self.outcomes.get(how, 0) + 1
        if how == "survived":
            at = f"{name}:{mutant.line}"
            self.survivors.append({"at": at, "change": str(mutant), "tests": tests})
            print(f"  survived: {at} {mutant} ({tests} tests)", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    arguments.add_argument("module", choices=sorted(MODULES))
    arguments.add_argument("--sample", type=int, default=100, help="mutants to judge")
    arguments.add_argument(
        "--from", type=int, default=0, dest="first", help="of the seed's sequence"
    )
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--jobs", type=int, default=1)
    arguments.add_argument("--files", nargs="*", help="only these files of the module")
    arguments.add_argument(
        "--longest", type=float, default=float("inf"), help="seconds of a test that judges"
    )
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
    lines, seconds = traced(trees[0], module.tests, files)
    seconds = {test: took for test, took in seconds.items() if took <= given.longest}
    population, unseen = drawn(files, lines, module, given.seed)
    chosen = population[given.first : given.first + given.sample]
    print(
        f"{given.module}: {len(files)} files, {len(seconds)} tests; {len(chosen)} of {len(population)} "
        f"mutants from {given.first} on, seed {given.seed}; {unseen} more lie where none of these "
        "tests comes",
        flush=True,
    )
    report = Report(given.module, given.seed, given.first, len(population), unseen)
    for name, mutant, tests, how in judged(chosen, trees, module, lines, seconds):
        report.add(name, mutant, tests, how)
        if given.out:  # so far: whoever ends it can go on from here
            given.out.write_text(json.dumps(asdict(report), indent=1, ensure_ascii=False) + "\n")
    print(f"{given.module}: {report.outcomes} in {report.seconds} s", flush=True)
    for tree in trees:
        shutil.rmtree(tree, ignore_errors=True)


if __name__ == "__main__":
    main()
