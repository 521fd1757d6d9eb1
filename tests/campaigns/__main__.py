"""Campaigns of random worlds, drawn from a seed: ``python -m campaigns chaos``, ``soak`` or ``nics``.

- ``chaos``: one world after another, each with a random fault (``make chaos``).
- ``soak``: long lives of several worlds at once, at whose end a rank is killed (``make soak``).
- ``nics``: random puts of NIC sessions on the software device, whose links and queues fail.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from campaigns.faults import KINDS
from campaigns.lives import Plan, Soaked, overall, soak
from campaigns.many import Many, many
from campaigns.nics import soak_nics
from campaigns.pinned import pinned
from campaigns.report import Report, merge
from campaigns.turns import campaign

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

import results_file  # noqa: E402


class Step(NamedTuple):
    """One turn or life that is over: a line about it, what was wrong, and what repeats it."""

    line: str
    wrong: list[str]
    detail: str = ""


def main() -> int:
    """Run a campaign. Return 1 if anything was wrong."""
    options = _parser().parse_args()
    for ending in (signal.SIGINT, signal.SIGTERM):  # the first is ignored behind a shell's `&`
        signal.signal(ending, signal.default_int_handler)  # ends its processes
    run = {"chaos": _chaos, "soak": _soak, "nics": _nics}[options.campaign]
    return 1 if run(options) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m campaigns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="campaign", required=True)
    chaos, soaks, nics = (kinds.add_parser(name) for name in ("chaos", "soak", "nics"))
    for each, seconds in ((chaos, 120.0), (soaks, 240.0), (nics, 600.0)):
        each.add_argument("--seconds", type=float, default=seconds)
        each.add_argument("--seed", type=int, default=0)
    for each in (soaks, nics):
        each.add_argument("--output", type=Path, help="a JSON file for the result")

    chaos.add_argument("--turns", type=int, default=1 << 40, help="at most so many")
    chaos.add_argument("--first", type=int, default=0, help="number of the first turn")
    chaos.add_argument("--kind", choices=sorted(KINDS), help="of every turn's fault")
    chaos.add_argument("--keep-going", action="store_true", help="also after a turn that is wrong")
    chaos.add_argument("-v", "--verbose", action="store_true", help="each turn in full")
    chaos.add_argument("--pinned", action="store_true", help="those of pinned.json first")

    soaks.add_argument("--accelerator", default="streams")
    soaks.add_argument(
        "--ranks", type=int, help="default: a GPU each, else 3; of --calls 2 at most"
    )
    soaks.add_argument("--life", type=float, default=60.0, help="seconds until a rank is killed")
    soaks.add_argument(
        "--beside",
        type=int,
        default=0,
        help="how many other soaks use the same devices meanwhile [0]; what all processes use of a "
        "device's memory is not judged then",
    )
    soaks.add_argument("--calls", type=int, help="instead so many calls of one small op")
    soaks.add_argument(
        "--graph", action="store_true", help="with --calls: replayed by a CUDA graph"
    )
    soaks.add_argument("--start", type=int, default=0, help="with --calls: of earlier ones, as if")
    soaks.add_argument(
        "--merge", type=Path, nargs="+", help="only make one summary of these files of one machine"
    )

    nics.add_argument("--nic", action="append", choices=("cx7", "efa"), help="default: both")
    return parser


def _drive(steps: Iterable[Step], keep_going: bool) -> list[str]:
    """Print each step with the seconds so far; return all that was wrong. The first wrong step ends the
    campaign unless ``keep_going``."""
    start, found = time.monotonic(), []
    for step in steps:
        print(f"{time.monotonic() - start:7.1f} s  {step.line}", flush=True)
        if step.wrong and step.detail:
            print(step.detail, flush=True)
        for each in step.wrong:
            print(f"  WRONG {each}", flush=True)
        found += step.wrong
        if step.wrong and not keep_going:
            break
    return found


# ---- worlds with random faults ---------------------------------------------------------------------


def _chaos(options: argparse.Namespace) -> list[str]:
    counts: Counter[str] = Counter()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        wrong = _drive(_turns(options, Path(folder), counts), options.keep_going)
    for name, count in sorted(counts.items()):
        print(f"{count:6} {name}")
    seconds = time.monotonic() - start
    print(f"{sum(counts.values())} turns in {seconds:.0f} s, {len(wrong)} wrong")
    return wrong


def _turns(options: argparse.Namespace, folder: Path, counts: Counter[str]) -> Iterator[Step]:
    before = [each.turn() for each in pinned()] if options.pinned else []
    end = time.monotonic() + options.seconds
    played = campaign(folder, options.seed, options.first, options.kind, before)
    for number, result in enumerate(played, 1):
        turn, came_to = result.turn, result.outcome.summary()
        counts[f"{turn.fault.kind}: {came_to}"] += 1
        shown = turn.in_full() if options.verbose else turn
        yield Step(f"{shown}: {came_to}", result.wrong, turn.in_full())
        if number >= options.turns or time.monotonic() > end:
            return


# ---- long lives ------------------------------------------------------------------------------------


def _soak(options: argparse.Namespace) -> list[str]:
    if options.merge:
        merged = merge([json.loads(file.read_text()) for file in options.merge])
        return _report(merged, options.output)
    ranks = options.ranks or torch.cuda.device_count() or 3
    if options.calls:
        calls = Many(
            options.accelerator, min(ranks, 2), options.calls, options.start, graph=options.graph
        )
        return _report(results_file.described("soak", many(calls).summary()), options.output)
    plan = Plan(
        options.seed, options.accelerator, options.seconds, options.life, ranks,
        beside=options.beside,
    )  # fmt: skip
    soaked, report = Soaked(), Report(plan)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        _drive(_lives(plan, Path(folder), soaked, report, options.output), keep_going=True)
    report.end(overall(plan, soaked))
    return _report(results_file.described("soak", report.summary()), options.output)


def _lives(
    plan: Plan, folder: Path, soaked: Soaked, report: Report, output: Path | None
) -> Iterator[Step]:
    """Play lives; ``output`` holds what came of them so far, written after each."""
    _write(results_file.described("soak", report.summary()), output)
    for ended, wrong in soak(plan, folder, soaked):
        report.add(ended, wrong)
        _write(results_file.described("soak", report.summary()), output)
        yield Step(report.line(ended), wrong)


def _report(result: dict[str, Any], output: Path | None) -> list[str]:
    print(json.dumps(result, indent=2))
    _write(result, output)
    wrong: list[str] = result["figures"]["wrong"]
    for each in wrong:
        print(f"WRONG {each}")
    return wrong


def _write(result: dict[str, Any], output: Path | None) -> None:
    if output:
        output.write_text(json.dumps(result, indent=2) + "\n")


# ---- sessions of NICs ------------------------------------------------------------------------------


def _nics(options: argparse.Namespace) -> list[str]:
    figures = soak_nics(options.nic or ["cx7", "efa"], options.seconds, options.seed)
    return _report(results_file.described("nic_soak", figures), options.output)


if __name__ == "__main__":
    sys.exit(main())
