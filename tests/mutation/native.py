"""Mutation testing of the NICs' native code: what of the data path no native test notices.

    python tests/mutation/native.py [--sample N] [--from N] [--seed S] [--at PLACE...] [--out FILE]

Draws changes of single operators and numbers in FILES, builds the tests in a copy of the tree
(build/mutation) and runs them, the model of all interleavings first. A change that does not compile is
none. Before that each file is broken as a whole, once: tests that pass then do not run it, and judge
nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tree_copy import ROOT, copy_of_tree

FILES = (
    "backends/nics/verbs/arrivals.cpp",
    "backends/nics/verbs/data_path.cpp",
    "backends/nics/efa/srd_nic.cpp",
    "backends/nics/completions.hpp",
)
TESTS = ("arrivals", "put_model", "bring_up", "session", "srd", "proxy", "mover")
TARGETS = tuple(f"test_{name}" for name in TESTS)
_CHANGES = {
    "==": "!=", "!=": "==", "<": "<=", ">": ">=", "<=": "<", ">=": ">", "&&": "||", "||": "&&",
    "+": "-", "-": "+", "+=": "-=", "++": "--", "true": "false", "false": "true",
}  # fmt: skip
_TOKEN = re.compile(
    r"(?<=\s)(==|!=|<=|>=|&&|\|\||\+=|[<>+-])(?=\s)|\+\+|\b(true|false)\b|(?<![\w.\"'])\d+(?![\w.'])"
)
_BUILD_S = 1800
"""Within which anything builds, however busy the machine is."""
_SLACK = 10.0
"""So many times longer than unmutated, and a minute, tests may take."""


def changes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, what to put there), outside of comments, texts, includes and messages."""
    found = []
    at = 0
    for line in text.splitlines(keepends=True):
        code = line.split("//")[0]
        if not code.startswith("#") and '"' not in code and "template" not in code:
            for token in _TOKEN.finditer(code):
                word = token[0]
                after = _CHANGES.get(word) or str(int(word) + 1)
                found.append((at + token.start(), at + token.end(), after))
        at += len(line)
    return found


def run(command: list[str], tree: Path, limit_s: float = _BUILD_S) -> bool:
    """Whether it succeeded. TimeoutExpired."""
    ended = subprocess.run(command, cwd=tree, capture_output=True, timeout=limit_s, check=False)
    return ended.returncode == 0


_BROKEN = "\nnamespace { [[maybe_unused]] const bool broken = (__builtin_trap(), true); }\n"
"""At the end of a file: every program that it is part of ends as it starts."""


def survives(build: list[str], tests: list[str], file: Path, text: str, tree: Path) -> bool | None:
    """Whether the tests pass with ``text`` in the place of a file's own; None: it does not compile."""
    before = file.read_text()
    file.write_text(text)
    try:
        return run(tests, tree) if run(build, tree) else None
    finally:
        file.write_text(before)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    arguments.add_argument("--sample", type=int, default=40)
    arguments.add_argument(
        "--from", type=int, default=0, dest="first", help="of the seed's sequence"
    )
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument(
        "--at", nargs="*", help="only changes of these lines, as srd_nic.cpp:161; no self-test then"
    )
    arguments.add_argument("--out", type=Path, help="JSON of the outcomes")
    given = arguments.parse_args()
    tree = ROOT / "build/mutation/nics"
    copy_of_tree(tree)
    configure = ["cmake", "-S", ".", "-B", "build/native", "-G", "Ninja", "-DMKERNEL_CUDA=OFF"]
    configure += ["-DMKERNEL_NATIVE_TESTS=ON"]
    build = ["cmake", "--build", "build/native", "--target", *TARGETS]
    tests = ["ctest", "--test-dir", "build/native", "--stop-on-failure"]
    tests += ["-R", rf"^(nics|model)\.({'|'.join(TESTS)})$", "--no-tests=error"]
    subprocess.run(
        [*configure, f"-DPython_EXECUTABLE={sys.executable}"], cwd=tree, check=True, stdout=-3
    )
    subprocess.run(build, cwd=tree, check=True, stdout=-3)
    began = time.monotonic()
    if not run(tests, tree):
        raise SystemExit("the tests do not pass unmutated")
    tests += ["--timeout", str(round(60 + _SLACK * (time.monotonic() - began)))]

    def chosen(name: str, text: str, start: int) -> bool:
        at = f"{name}:{text.count(chr(10), 0, start) + 1}"
        return not given.at or any(at.endswith(place) for place in given.at)

    for name in FILES if not given.at else ():
        text = (tree / name).read_text() + _BROKEN
        if survives(build, tests, tree / name, text, tree) is not False:
            raise SystemExit(f"{name} broken as a whole does not compile, or the tests still pass")
    every = []
    for name in FILES:
        text = (tree / name).read_text()
        every += [(name, *change) for change in changes(text) if chosen(name, text, change[0])]
    every.sort(key=lambda each: hashlib.sha256(f"{given.seed} {each}".encode()).hexdigest())
    outcomes = {"killed": 0, "survived": 0, "no program": 0}
    survivors = []
    for name, start, end, after in every[given.first : given.first + given.sample]:
        text = (tree / name).read_text()
        mutant = text[:start] + after + text[end:]
        passed = survives(build, tests, tree / name, mutant, tree)
        how = {None: "no program", False: "killed", True: "survived"}[passed]
        outcomes[how] += 1
        if how == "survived":
            line = text.count("\n", 0, start) + 1
            what = f"{text.splitlines()[line - 1].strip()} | {text[start:end]} → {after}"
            survivors.append({"at": f"{name}:{line}", "change": what})
            print(f"  survived: {name}:{line} {what}", flush=True)
        if given.out:  # so far: a build and its tests take long
            report = {"module": "nics", "seed": given.seed, "first": given.first}
            report |= {"mutants": len(every)}
            report |= {"outcomes": outcomes, "survivors": survivors}
            given.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(f"nics: {outcomes} of {len(every)}, seed {given.seed}", flush=True)


if __name__ == "__main__":
    main()
