"""The NIC side on one machine: the command FIFO, our own work per put, puts on the soft provider.

    python bench/nic.py [--build build/native] [--megabytes 2048]

Runs the native benchmarks of tests/native/nics out of a build folder. Puts and memcpy of the same
bytes take turns there; medians. On a busy machine run it under ``chrt -r 1``.
Bars: 2 million commands a second through the FIFO on one core; 200 ns of our own work per put, from
the FIFO to its completion and its signal; 1 MiB puts at 0.8 of a single-threaded memcpy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import results_file

COMMANDS_PER_S, OWN_NS, VS_MEMCPY = 2e6, 200.0, 0.8
LIMIT_S = 120
SCHEDULING = {os.SCHED_RR: "real-time, round robin", os.SCHED_OTHER: "normal"}


def run(program: Path, *arguments: str) -> dict[str, Any]:
    """What the program printed. SystemExit: it is not built, or failed."""
    if not program.exists():
        raise SystemExit(f"{program} is not built; `make test` builds it, or name --build")
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{program.name} returned {done.returncode}: {done.stderr or done.stdout}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def main() -> int:
    """Measure, write the result; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--build", type=Path, default=results_file.ROOT / "build" / "native")
    parser.add_argument("--megabytes", type=int, default=2048, help="moved per size of put")
    options = parser.parse_args()
    nics = options.build / "backends" / "nics"
    load = round(os.getloadavg()[0], 2)  # of the machine: other work on it makes figures noisy
    own = run(nics / "tests" / "own_work_benchmark", str(nics / "tests" / "libnull_verbs.so"))
    puts = run(
        nics / "tests" / "put_benchmark",
        str(nics / "libmkernel_softverbs.so"),
        str(options.megabytes),
    )
    fifo, work = own["fifo_one_core_commands_per_s"], own["own_ns_per_put"]
    ratio = puts["put_1MiB_vs_memcpy"]
    held = {
        f"FIFO on one core >= {COMMANDS_PER_S:.0f} commands/s": fifo >= COMMANDS_PER_S,
        f"own work per put <= {OWN_NS:.0f} ns": work <= OWN_NS,
        f"1 MiB puts >= {VS_MEMCPY} of memcpy": ratio >= VS_MEMCPY,
    }
    results_file.write(
        "nic",
        {
            "load_before": load,
            "scheduling": SCHEDULING.get(os.sched_getscheduler(0), "other"),
            "bars_held": held,
            **own,
            **puts,
        },
    )
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
