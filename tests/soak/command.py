"""The soak as a command: ``python -m soak.command [--seconds N] [--seed N] [--accelerator NAME]``; see
``make soak``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from soak.driver import Plan, Soaked, overall, soak
from soak.many import Many, many
from soak.report import Report, merge

from mkernel.harness.provenance import devices, provenance

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

import results_file  # noqa: E402


def main() -> int:
    """Soak; 1 where anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m soak.command", description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accelerator", default="streams")
    parser.add_argument(
        "--ranks", type=int, help="default: a GPU each, else 3; of --calls 2 at most"
    )
    parser.add_argument("--life", type=float, default=60.0, help="seconds until a rank is killed")
    parser.add_argument("--calls", type=int, help="instead so many calls of one small op")
    parser.add_argument("--start", type=int, default=0, help="with --calls: of earlier ones, as if")
    parser.add_argument("--output", type=Path, help="a file for what came of it")
    parser.add_argument(
        "--merge", type=Path, nargs="+", help="only make one summary of these files, by this commit"
    )
    options = parser.parse_args()
    if options.merge:
        merged = merge([json.loads(file.read_text()) for file in options.merge])
        found = {"format": results_file.FORMAT, "benchmark": "soak"}
        found |= provenance(ROOT, os.environ.get("MKERNEL_COMMIT"))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        found["hardware"] = {**found["hardware"], **devices(device)}
        return _told({**found, "figures": merged}, options.output, merged["wrong"])
    ranks = options.ranks or torch.cuda.device_count() or 3
    if options.calls:
        calls = many(Many(options.accelerator, min(ranks, 2), options.calls, options.start))
        return _told(calls.summary(), options.output, calls.wrong)
    plan = Plan(options.seed, options.accelerator, options.seconds, options.life, ranks)
    report = _lives(plan)
    return _told(report.summary(), options.output, report.wrong)


def _told(found: dict[str, Any], output: Path | None, wrong: list[str]) -> int:
    text = json.dumps(found, indent=2)
    print(text)
    if output:
        output.write_text(text + "\n")
    for each in wrong:
        print(f"WRONG {each}")
    return 1 if wrong else 0


def _lives(plan: Plan) -> Report:
    soaked, report = Soaked(), Report(plan)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        for ended, wrong in soak(plan, Path(folder), soaked):
            report.add(ended, wrong)
            print(report.line(ended), flush=True)
            for each in wrong:
                print(f"  WRONG {each}", flush=True)
    report.wrong += overall(plan, soaked)
    return report


if __name__ == "__main__":
    sys.exit(main())
