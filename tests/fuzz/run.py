"""Fuzzes what reads data from outside (atheris, libFuzzer).

    python tests/fuzz/run.py [--seconds 300] [--keep] [--report]

Every target first runs its corpus, then mutations of it: a fixed number of them, which a fixed seed
draws, so that the verdict is always the same; or with ``--seconds`` for that time, from a random seed
and with coverage as feedback.
Returns 1 where one raised what it should not, hung or grew; says where in build/fuzz the input is.
``--keep`` adds to the corpus what reached new code, for a long run by hand. ``--report`` writes
bench/results/fuzz.json: which lines of the readers the corpus executes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import corpora

ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / "build" / "fuzz"
INSTRUMENTED = [
    *(
        "mkernel.world.bootstrap",
        "mkernel.world.heartbeats",
        "mkernel.world.watchdog",
        "mkernel.topology",
        "mkernel.backends.nics",
    ),
    *("mkernel.cli", "mkernel.settings", "mkernel.user_files", "mkernel.harness.inputs"),
    *("mkernel.plan", "mkernel.harness.shapes", "mkernel.harness.results"),
    *("mkernel.harness.gpu_tests", "mkernel.schema_version"),
    *("mkernel.bug_report", "mkernel.failure_record"),
]
READERS = {
    "bootstrap": (
        "mkernel/world/bootstrap.py", "mkernel/world/sealing.py", "backends/nics/session.py",
    ),
    "topology": (
        "topology/discover.py", "topology/merge.py", "topology/model.py",
        "topology/sources/description.py",
        "topology/sources/formats.py", "topology/sources/hwloc.py",
        "topology/sources/nccl.py", "topology/sources/npu.py",
        "topology/sources/xml.py",
    ),
    "arguments": (
        "mkernel/cli/bench.py", "mkernel/cli/main.py", "mkernel/cli/plan.py", "mkernel/cli/probe.py",
        "mkernel/cli/run.py", "mkernel/harness/shapes.py", "mkernel/settings.py",
        "mkernel/user_files.py",
    ),
    "files": (
        "mkernel/harness/gpu_tests.py", "mkernel/harness/inputs.py", "mkernel/harness/results.py",
        "mkernel/plan/model.py", "mkernel/schema_version.py", "mkernel/user_files.py",
        "topology/cost.py",
    ),
    "record": ("mkernel/bug_report.py", "mkernel/failure_record.py"),
}  # fmt: skip
"""By target: the files that read what it makes. What else they do is not its to cover."""
TARGETS = tuple(READERS)
RUNS = {"bootstrap": 12000, "topology": 4000, "arguments": 800, "files": 2500, "record": 1500}
"""Executions of each target without ``--seconds``, its corpus among them: together 20 s of CPU time."""
SEED = 1
LIMIT_S = 600
"""Until a target ends, beyond its own seconds, on a busy machine."""


def import_targets(*, instrumented: bool) -> ModuleType:
    """Import the targets, instrumented to count which code they reach."""
    if not instrumented:
        import targets

        return targets
    import atheris

    names = io.StringIO()  # one of each module
    with contextlib.redirect_stderr(names), atheris.instrument_imports(include=INSTRUMENTED):
        import targets

    return targets


def fuzz(targets: ModuleType, target: str, scratch: Path, seconds: int | None) -> None:
    """Fuzz a target in this process, which ends with it.

    Args:
        scratch: a folder for what is said, for files that the target writes, and in ``new`` for
            inputs that reached new code.
    """
    import atheris

    said = os.open(scratch / "said", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    targets.FILE = scratch / "file"

    def one(data: bytes) -> None:
        try:
            targets.TARGETS[target](data)
        except BaseException:
            path = FOUND / f"{target}-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            traceback.print_exc()
            print(f"the input is in {path}", flush=True)
            os._exit(1)

    new, seeds = scratch / "new", scratch / "seeds"
    new.mkdir()
    # By name: libFuzzer would read a folder in the order of the file system.
    seeds.write_text(",".join(map(str, corpora.unpack(target, scratch / "corpus"))))
    limits = ["-timeout=30", "-rss_limit_mb=2048", "-max_len=16384", "-reload=0"]
    if seconds is None:
        limits += [f"-runs={RUNS[target]}", f"-seed={SEED}", "-keep_seed=1", "-entropic=0"]
    else:
        limits.append(f"-max_total_time={seconds}")
    artifacts = f"-artifact_prefix={FOUND}/{target}-"
    atheris.Setup([sys.argv[0], *limits, artifacts, f"-seed_inputs=@{seeds}", str(new)], one)
    atheris.Fuzz()


def covered(target: str) -> dict[str, Any]:
    """Statements of a target's readers that its corpus executes, and how many there are; in this
    process, which has imported none of them."""
    from coverage import Coverage

    coverage = Coverage(data_file=None, include=[str(ROOT / name) for name in READERS[target]])
    coverage.start()
    from targets import TARGETS as functions

    given = corpora.read(target)
    for data in given.values():
        functions[target](data)
    coverage.stop()
    found: dict[str, Any] = {}
    for name in READERS[target]:
        _, statements, _, missing, _ = coverage.analysis2(str(ROOT / name))
        found[name] = [len(statements) - len(missing), len(statements)]
    return {"corpus": len(given), "statements": found}


def report(seconds: int, said: dict[str, str]) -> None:
    """Write what was run, and what the corpora cover."""
    sys.path.append(str(ROOT / "bench"))
    import results_file

    figures: dict[str, Any] = {"seconds": seconds, "found": 0, "targets": {}}
    for target in TARGETS:
        command = [sys.executable, __file__, "--covered", target]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        runs = re.search(r"Done (\d+) runs", said[target])
        ran = {"runs": int(runs[1]) if runs else 0}
        figures["targets"][target] = ran | json.loads(told.splitlines()[-1])
    results_file.write("fuzz", figures)


def run_all(folder: Path, seconds: int | None) -> tuple[dict[str, str], bool]:
    """Run all targets at once, each in a process and a folder of its own.

    Returns:
        What each said, and whether one failed.
    """
    # Once: the processes are forks of this one. Which code an input reaches may depend on paths,
    # hashes and addresses, so a fixed choice of inputs does not follow it.
    targets = import_targets(instrumented=seconds is not None)
    fork = multiprocessing.get_context("fork")
    deadline = time.monotonic() + (seconds or 0) + LIMIT_S
    runs = {}
    for target in TARGETS:
        (folder / target).mkdir()
        arguments = (targets, target, folder / target, seconds)
        runs[target] = fork.Process(target=fuzz, args=arguments)
        runs[target].start()
    heard, failed = {}, False
    try:
        for target, process in runs.items():
            process.join(max(0.0, deadline - time.monotonic()))
            heard[target] = (folder / target / "said").read_text(errors="replace")
            last = heard[target].strip().splitlines()[-1:]
            print(f"{target}: {last[0] if last else 'said nothing'}")
            if process.exitcode != 0:
                failed = True
                print(heard[target][-5000:], f"{target}: exit code {process.exitcode}", sep="\n")
    finally:
        for process in runs.values():
            process.kill()
            process.join()
    return heard, failed


def main() -> int:
    """Fuzz all targets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=int, help="for each target, all at once")
    parser.add_argument("--keep", action="store_true", help="add to the corpus")
    parser.add_argument("--report", action="store_true", help="write bench/results/fuzz.json")
    parser.add_argument("--covered", choices=TARGETS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.covered:
        print(json.dumps(covered(chosen.covered)))
        return 0
    if chosen.report and chosen.seconds is None:
        parser.error("--report needs --seconds")
    FOUND.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        heard, failed = run_all(Path(scratch), chosen.seconds)
        if chosen.keep:
            for target in TARGETS:
                new = (Path(scratch) / target / "new").iterdir()
                found = {each.name: each.read_bytes() for each in new}
                corpora.write(target, corpora.read(target) | found)
    if chosen.report and not failed:
        report(chosen.seconds, heard)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
