"""Flags that copy engines copy behind their data: how often one came before them.

    python bench/copied_flags.py [--build build/native] [--iterations 1000000]

Between GPUs 0 and 1, in one process (``tests/native/cuda/copied_flags.cu``). Beside it, the same where
the flag is copied before its data, and where it is on another stream and nothing orders it: how often a
wrong order shows says what the right one's zero is worth. Writes ``bench/results/copied_flags.json``;
1 where a word was wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import results_file
import torch

from mkernel.harness.provenance import devices

WRONG_ORDERS = ("flag_before_data", "flag_on_another_stream")
WRONG_ITERATIONS = 20_000
PATIENCE_S = 240


def found(program: Path, *arguments: object) -> tuple[bool, dict[str, Any]]:
    """Whether it held, and what was seen. SystemExit: not built, or no figures."""
    if not program.is_file():
        raise SystemExit(f"{program} is not built; `make test` builds it, with nvcc")
    command = [str(program), *map(str, arguments)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise SystemExit(f"{' '.join(command)}: no end within {late.timeout} s") from late
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}")
    told: dict[str, Any] = json.loads(done.stdout)
    return done.returncode == 0, told


def main() -> int:
    """Run it, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--build", type=Path, default=results_file.ROOT / "build" / "native")
    parser.add_argument("--iterations", type=int, default=1_000_000)
    options = parser.parse_args()
    program = options.build / "backends" / "cuda" / "tests" / "copied_flags"
    held, right_order = found(program, "check", options.iterations)
    wrong = {order: found(program, "unheld", WRONG_ITERATIONS, order)[1] for order in WRONG_ORDERS}
    results_file.write(
        "copied_flags",
        {
            **devices(torch.device("cuda")),
            "held": held,
            "data_then_flag": right_order,
            "wrong_orders": wrong,
        },
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
