"""The soak as a command: ``python -m soak.command [--seconds N] [--seed N] [--accelerator NAME]``; see
``make soak``."""

from __future__ import annotations

import argparse
import json
import os
import signal
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
    options = _parser().parse_args()
    if options.merge:
        merged = merge([json.loads(file.read_text()) for file in options.merge])
        return _told(merged, options.output)
    ranks = options.ranks or torch.cuda.device_count() or 3
    if options.calls:
        calls = Many(
            options.accelerator, min(ranks, 2), options.calls, options.start, graph=options.graph
        )
        return _told(_result(many(calls).summary()), options.output)
    plan = Plan(
        options.seed, options.accelerator, options.seconds, options.life, ranks,
        beside=options.beside,
    )  # fmt: skip
    return _told(_result(_lives(plan, options.output).summary()), options.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m soak.command", description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accelerator", default="streams")
    parser.add_argument(
        "--ranks", type=int, help="default: a GPU each, else 3; of --calls 2 at most"
    )
    parser.add_argument("--life", type=float, default=60.0, help="seconds until a rank is killed")
    parser.add_argument(
        "--beside",
        type=int,
        default=0,
        help="how many other soaks use the same devices meanwhile [0]; what all processes use of a "
        "device's memory is not judged then",
    )
    parser.add_argument("--calls", type=int, help="instead so many calls of one small op")
    parser.add_argument(
        "--graph", action="store_true", help="with --calls: replayed by a CUDA graph"
    )
    parser.add_argument("--start", type=int, default=0, help="with --calls: of earlier ones, as if")
    parser.add_argument(
        "--output", type=Path, help="a file for what came of it so far, written after every life"
    )
    parser.add_argument(
        "--merge", type=Path, nargs="+", help="only make one summary of these files of one machine"
    )
    return parser


def _result(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures beside what they were measured on."""
    found = {"format": results_file.FORMAT, "benchmark": "soak"}
    found |= provenance(ROOT, os.environ.get("MKERNEL_COMMIT"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found["hardware"] = {**found["hardware"], **devices(device)}
    return {**found, "figures": figures}


def _told(result: dict[str, Any], output: Path | None) -> int:
    print(json.dumps(result, indent=2))
    _write(result, output)
    for each in result["figures"]["wrong"]:
        print(f"WRONG {each}")
    return 1 if result["figures"]["wrong"] else 0


def _write(result: dict[str, Any], output: Path | None) -> None:
    if output:
        output.write_text(json.dumps(result, indent=2) + "\n")


def _lives(plan: Plan, output: Path | None) -> Report:
    soaked, report = Soaked(), Report(plan)
    for ending in (signal.SIGINT, signal.SIGTERM):  # the first is ignored behind a shell's `&`
        signal.signal(ending, signal.default_int_handler)  # ends its processes
    _write(_result(report.summary()), output)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        for ended, wrong in soak(plan, Path(folder), soaked):
            report.add(ended, wrong)
            print(report.line(ended), flush=True)
            for each in wrong:
                print(f"  WRONG {each}", flush=True)
            _write(_result(report.summary()), output)
    report.end(overall(plan, soaked))
    return report


if __name__ == "__main__":
    sys.exit(main())
