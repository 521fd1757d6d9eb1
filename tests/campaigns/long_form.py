"""The tests that take too long for CI, one after another, in an hour and a half at
most: ``make test-long``.

The summary goes to ``bench/results/test_long.json``: commit, and of each step its command, seconds and
whether it passed. A step that takes longer than it may is ended and has failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

import results_file  # noqa: E402

STEPS: tuple[tuple[str, int], ...] = (
    ("pytest -m long --numprocesses {workers} --dist worksteal", 420),
    ("mkernel conformance --accelerator ascend", 480),
    ("mkernel conformance --accelerator streams", 480),
    ("mkernel conformance --nic cx7", 180),
    ("mkernel conformance --nic efa", 180),
    ("python -m campaigns chaos --pinned --seconds 240", 300),
    ("python -m campaigns soak --seconds 120 --accelerator streams", 180),
    ("python -m campaigns soak --seconds 120 --accelerator ascend", 180),
    ("python -m campaigns nics --seconds 120", 150),
    ("python tests/fuzz/run.py --seconds 120", 240),
    ("python tests/mutation/mutate.py planner --sample 5", 150),
    ("make kernels", 600),
    *(
        (f"python tests/other_torch.py {version}", 450)
        for version in ("2.6.0", "2.9.1", "2.10.0", "newest")
    ),
)
"""Commands, and the most seconds that each may take: an hour and a half together."""


def run(command: str, most_s: float) -> dict[str, Any]:
    """Run one step, whose output goes where ours goes. Return what the summary says of it."""
    print(f"== {command}", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        command.split(),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}"},
        start_new_session=True,
    )
    code: int | None = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(most_s)
    finally:
        if code is None:
            _end(process)
    seconds = round(time.monotonic() - began, 1)
    told = {"command": command, "seconds": seconds, "passed": code == 0}
    return told if code is not None else {**told, "ended_after_s": most_s}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a step and its processes. SIGINT comes first: a campaign then ends its ranks itself."""
    for number, patience_s in ((signal.SIGINT, 20.0), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum up the steps. JSON-safe."""
    return {
        "passed": len(steps) == len(STEPS) and all(step["passed"] for step in steps),
        "seconds": round(sum(step["seconds"] for step in steps), 1),
        "steps": list(steps),
    }


def main() -> int:
    """Run all steps, also after one that fails. Return 1 if any failed."""
    workers = min(8, 2 * (os.cpu_count() or 1))
    done = [run(command.format(workers=workers), most_s) for command, most_s in STEPS]
    figures = summary(done)
    results_file.write("test_long", figures)
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
