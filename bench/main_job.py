"""Wall time of the main job's command, from the shell's view, and what it reports of itself.

    python bench/main_job.py [--repeat 3]

Bar: at most 20 s on 2 cores after the first time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import results_file

BAR_S = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    command = [str(Path(sys.executable).parent / "mkernel"), "run", "all_gather_gemm", "--json"]
    command += ["--accelerator", "ascend"]
    seconds, reports = [], []
    for _ in range(options.repeat):
        start = time.perf_counter()
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=tempfile.gettempdir()
        )
        seconds.append(time.perf_counter() - start)
        reports.append(json.loads(done.stdout))
    keys = ("wall", "modelled", "modelled_machine", "nic_bytes")
    results_file.write(
        "main_job",
        {
            "command": " ".join(["mkernel", *command[1:]]),
            "seconds": {"all": seconds, "median": statistics.median(seconds), "bar": BAR_S},
            "passed": all(report["passed"] for report in reports),
            "error": max(report["verification"]["error"] for report in reports),
            "last_report": {key: reports[-1][key] for key in keys},
        },
    )
    return 0 if statistics.median(seconds) <= BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
