"""Fuzzes what reads data from outside, with coverage as feedback (atheris, libFuzzer).

    python tests/fuzz/run.py [--seconds 8] [--keep] [--report]

Every target first runs its corpus, then mutations of it. Returns 1 where one raised what it should not,
hung or grew; says where in build/fuzz the input is. ``--keep`` adds to the corpus what
reached new code, for a long run by hand. ``--report`` writes bench/results/fuzz.json: which lines of
the readers the corpus executes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).parent / "corpus"
FOUND = ROOT / "build" / "fuzz"
INSTRUMENTED = [
    *(
        "mkernel.world.bootstrap",
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
        "topology/discover.py", "topology/bounds.py", "topology/merge.py", "topology/model.py",
        "topology/sources/formats.py", "topology/sources/hwloc.py",
        "topology/sources/hwloc_links.py", "topology/sources/nccl.py", "topology/sources/npu.py",
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
START_S = 240
"""Until the targets run, and to end, on a busy machine."""


def fuzz(target: str, arguments: list[str]) -> None:
    """In this process; does not return. ``arguments``: libFuzzer's."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from targets import TARGETS as functions

    def one(data: bytes) -> None:
        try:
            functions[target](data)
        except BaseException:
            path = FOUND / f"{target}-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            traceback.print_exc()
            print(f"the input is in {path}", flush=True)
            os._exit(1)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def covered(target: str) -> dict[str, Any]:
    """Statements of a target's readers that its corpus executes, and how many there are; in this
    process, which has imported none of them."""
    from coverage import Coverage

    coverage = Coverage(data_file=None, include=[str(ROOT / name) for name in READERS[target]])
    coverage.start()
    from targets import TARGETS as functions

    given = sorted((CORPUS / target).iterdir())
    for each in given:
        functions[target](each.read_bytes())
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
        command = [sys.executable, __file__, "--covered", "--target", target]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        runs = re.search(r"Done (\d+) runs", said[target])
        ran = {"runs": int(runs[1]) if runs else 0}
        figures["targets"][target] = ran | json.loads(told.splitlines()[-1])
    results_file.write("fuzz", figures)


def begin(target: str, scratch: Path, seconds: int, keep: bool) -> subprocess.Popen[str]:
    """A process of its own for a target. ``scratch``: where new inputs go unless they are kept."""
    scratch.mkdir()
    folders = [CORPUS / target] if keep else [scratch, CORPUS / target]
    limits = [f"-max_total_time={seconds}", "-timeout=30", "-rss_limit_mb=2048", "-max_len=16384"]
    command = [sys.executable, __file__, "--target", target, "--", *limits]
    return subprocess.Popen(
        [*command, f"-artifact_prefix={FOUND}/{target}-", *map(str, folders)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def main() -> int:
    """Run all targets at once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=int, default=8, help="for each target, all at once")
    parser.add_argument("--keep", action="store_true", help="add to the corpus")
    parser.add_argument("--report", action="store_true", help="write bench/results/fuzz.json")
    parser.add_argument("--covered", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--target", choices=TARGETS, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.covered:
        print(json.dumps(covered(chosen.target)))
        return 0
    if chosen.target:
        fuzz(chosen.target, chosen.arguments)
    FOUND.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + chosen.seconds + START_S
    failed = False
    heard = {}
    with tempfile.TemporaryDirectory() as scratch:
        runs = {
            target: begin(target, Path(scratch) / target, chosen.seconds, chosen.keep)
            for target in TARGETS
        }
        try:
            for target, process in runs.items():
                said, _ = process.communicate(timeout=deadline - time.monotonic())
                heard[target] = said
                last = said.strip().splitlines()[-1:]
                print(f"{target}: {last[0] if last else 'said nothing'}")
                if process.returncode != 0:
                    failed = True
                    print(said[-5000:], f"{target}: exit code {process.returncode}", sep="\n")
        finally:
            for process in runs.values():
                process.kill()
                process.wait()
    if chosen.report and not failed:
        report(chosen.seconds, heard)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
