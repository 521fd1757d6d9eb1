"""The benchmark of what a call costs its host, where no device does anything: it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def test_calls_that_do_nothing_are_timed() -> None:
    done = subprocess.run(
        [sys.executable, BENCH / "host_time.py", "--accelerator", "nothing", "--ranks", "1",
         "--calls", "5", "--repeats", "2", "--shapes", "10"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert "fused, 1 ranks" in done.stdout, done.stderr
    lines = dict(line.strip().rsplit(maxsplit=1) for line in done.stdout.splitlines()[1:-1])
    assert float(lines["gemm_all_reduce known"]) > 0
    assert abs(float(lines["objects left"])) < 100  # 10,000 calls are started without Python
