"""Files of ``bench/results``: figures beside what they were measured on (commit, hardware, versions).

    python bench/results_file.py RAW RESULT

writes the summary of what ``mkernel bench --json RAW`` wrote: the same file without the single turns.
It keeps medians, spreads, counts of turns and dropped turns, verdicts, conditions and provenance, and
``mkernel.harness.results.read`` reads it. ``bench/measure.sh`` does so for every file that it makes. A
result of another kind is written with fewer digits and in fewer lines.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from mkernel.errors import InputFileError
from mkernel.harness import gpu_tests, modelled, results
from mkernel.harness.contenders import OURS
from mkernel.harness.provenance import devices, provenance
from mkernel.harness.results import Report, Row
from mkernel.schema_version import refusal

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
FORMAT = "mkernel-figures-1"
"""The format of results of scripts here; those of `mkernel bench` and pytest have their own."""
DIGITS, OTHERS_DIGITS = 5, 6
DIGITS_OF = {"median_us": 6, "compute_us": 6, "comm_us": 6, "floor_us": 6, "p10_us": 4, "p90_us": 4,
             "error": 3, "limit": 3}  # fmt: skip
"""Significant digits of a summary's figures, and of those of other results."""
RATIOS = ("tflops", "rho", "eta", "speedup", "to_gemm")
WIDTH = 240
"""The longest line of a result, in characters; values that fit stand on one line."""
_READ = (
    FORMAT,
    results.FORMAT,
    gpu_tests.FORMAT,
    modelled.ModelledReport.model_fields["format"].default,
    modelled.ComparisonReport.model_fields["format"].default,
)


def described(benchmark: str, figures: dict[str, Any]) -> dict[str, Any]:
    """A result: ``figures`` and what they were measured on, GPUs too. MKERNEL_COMMIT says which commit
    the tree is of where there is no git to ask."""
    found = provenance(ROOT, os.environ.get("MKERNEL_COMMIT"))
    if torch.cuda.is_available():
        found["hardware"] |= devices(torch.device("cuda"))
    return {"format": FORMAT, "benchmark": benchmark, **found, "figures": figures}


def write(name: str, figures: dict[str, Any]) -> None:
    """Print ``figures`` with their provenance and write ``bench/results/<name>.json``.

    A tree with uncommitted changes to tracked files is marked ``dirty``: do not quote such figures.
    """
    print(save(RESULTS / f"{name}.json", name, figures))


def save(path: Path, benchmark: str, figures: dict[str, Any]) -> str:
    """Write ``figures`` with their provenance; return the text."""
    text = laid_out(_rounded(described(benchmark, figures), OTHERS_DIGITS))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    return text


def read(name: str, folder: Path = RESULTS) -> Any:
    """The JSON object of ``<name>.json``. InputFileError: it has no format, or another version's."""
    content = json.loads((folder / f"{name}.json").read_text())
    told = content.get("format")
    if told not in _READ:
        raise InputFileError(
            f"result {folder / name}.json: format: {refusal(told, ' or '.join(map(repr, _READ)))}"
        )
    return content


def hold(file: Path, made: Callable[[], str], about: str) -> int:
    """Compare a file with what it is made from, or write it (``--write``); 1 where it differs. The main
    of scripts that make pages and pictures."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        file.write_text(made())
    elif file.read_text() != made():
        print(f"{file} is not what bench/results has; --write writes it")
        return 1
    return 0


def laid_out(content: Any, indent: int = 0) -> str:
    """Return JSON of which each part that fits stands on one line."""
    line = json.dumps(content, separators=(",", ":"))
    if len(line) <= WIDTH or not isinstance(content, dict | list):
        return line
    if isinstance(content, dict):
        parts = [
            f"{json.dumps(name)}:{laid_out(each, indent + 1)}" for name, each in content.items()
        ]
    else:
        parts = [laid_out(each, indent + 1) for each in content]
    inside = f",\n{' ' * (indent + 1)}".join(parts)
    first, last = "{}" if isinstance(content, dict) else "[]"
    return f"{first}\n{' ' * (indent + 1)}{inside}\n{' ' * indent}{last}"


def summary(report: Report) -> dict[str, Any]:
    """Return a report without its turns.

    The planner's account of its constants is cut to its first sentence; the backend's data file at that
    commit has the rest. Shapes are listed once, by the rows. Parts that no row timed are left out, and
    so are ratios of peers, which follow from medians, and errors of peers that are right.
    """
    found = report.model_dump(mode="json", exclude={"rows": True, "spec": {"shapes"}})
    if report.conditions is not None:
        found["conditions"]["planner"] = report.conditions.planner.partition(". ")[0]
    untimed = {
        name
        for name in report.spec.contenders
        if all(
            row.entries[name].kind != "op" and row.entries[name].state == "absent"
            for row in report.rows
        )
    }
    found["spec"]["contenders"] = [name for name in report.spec.contenders if name not in untimed]
    return {**found, "rows": [_without_turns(row, untimed) for row in report.rows]}


def _without_turns(row: Row, untimed: Collection[str]) -> dict[str, Any]:
    entries = {}
    for name, entry in row.entries.items():
        if name in untimed:
            continue
        counted = entry.turns or len(entry.seconds) or None
        changed: dict[str, Any] = {"seconds": (), "skew_us": (), "turns": counted}
        if entry.figures is not None and name != "mkernel":
            changed["figures"] = entry.figures.model_copy(update=dict.fromkeys(RATIOS))
        if entry.state == "right" and name not in OURS:
            changed |= {"error": None, "limit": 0.0}
        entries[name] = entry.model_copy(update=changed)
    kept = row.model_copy(update={"entries": entries})
    found: dict[str, Any] = _rounded(kept.model_dump(mode="json", exclude_defaults=True))
    return found


def _rounded(content: Any, digits: int = DIGITS) -> Any:
    if isinstance(content, dict):
        return {name: _rounded(each, DIGITS_OF.get(name, digits)) for name, each in content.items()}
    if isinstance(content, list):
        return [_rounded(each, digits) for each in content]
    return float(f"{content:.{digits}g}") if isinstance(content, float) else content


def main() -> None:
    """Write a summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("raw", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    report = results.read(options.raw)
    if report is not None:
        content = summary(report)
    else:
        content = _rounded(json.loads(options.raw.read_text()), OTHERS_DIGITS)
    options.result.parent.mkdir(parents=True, exist_ok=True)
    options.result.write_text(laid_out(content) + "\n")


if __name__ == "__main__":
    main()
