"""Times of every way of a call, to which the planner's constants are fitted and by which it is judged.

    python bench/ways.py RAW...

adds what ``mkernel bench --json RAW`` measured (``bench/measure.sh ways``) to
``bench/results/ways.json``, in the place of an earlier file of that name. It keeps the median of each
contender that does the whole op, in microseconds; the rest of RAW stays out of the repository.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import results_file

from mkernel.harness import results

NAME = "ways"
SHAPE = ("op", "m", "n", "k", "layout")
SAID = ("file", "commit", "seed", "mode", "ranks", "dtype", "scales", "fast_accum")
"""What the table has of a shape, and of a result."""


FUSED = "mkernel-fused"
TILED_ROWS = range(129, 1025)
"""Rows of GEMM+AllReduce whose tiles leave by mail in one node."""
BEFORE_TILES = "2026-11-29", "hopper_ways_few_rows_2"
"""The date of the first such result, and the one of that day that is older."""


def is_other_kernel(result: Mapping[str, Any], row: Sequence[Any]) -> bool:
    """Return whether the fused path had another kernel for that row then."""
    op, m = row[:2]
    tiled = op == "gemm_all_reduce" and m in TILED_ROWS and result["dtype"] == "bfloat16"
    first, older = BEFORE_TILES
    return tiled and (result.get("date", "") < first or result["file"] == older)


class Measured(NamedTuple):
    """One call: what it was, and its median times in microseconds by contender.

    Attributes:
        file: the name of the result that has it. commit: what was measured. seed: of drawn shapes.
        layout: of B; None: the run's, which is row-major.
    """

    file: str
    commit: str
    seed: int | None
    op: str
    m: int
    n: int
    k: int
    layout: str | None
    mode: str
    ranks: int
    dtype: str
    scales: str | None
    fast_accum: bool
    us: Mapping[str, float]


def measured(files: Iterable[Path]) -> Iterator[Measured]:
    """Return the rows of results of ``mkernel bench`` and of tables that this file wrote, without
    what the fused path took by a kernel that it does not run any more."""
    for path in files:
        content = json.loads(path.read_text())
        parts = content["figures"]["files"] if content.get("benchmark") == NAME else [part(path)]
        for each in parts:
            said = {name: each[name] for name in SAID}
            for row in each["rows"]:
                shape, times = row[: len(SHAPE)], row[len(SHAPE) :]
                us = {
                    name: time
                    for name, time in zip(each["contenders"], times, strict=True)
                    if time is not None and not (name == FUSED and is_other_kernel(each, row))
                }
                yield Measured(**dict(zip(SHAPE, shape, strict=True)), us=us, **said)


def part(path: Path) -> dict[str, Any]:
    """Return what the table keeps of one result."""
    report = results.read(path)
    if report is None:
        raise SystemExit(f"{path} is no result of mkernel bench")
    (mode,) = report.spec.modes
    names = [
        name
        for name in report.spec.contenders
        if any(row.entries[name].kind == "op" for row in report.rows)
    ]
    rows = []
    for row in report.rows:
        found = (row.entries[name].figures for name in names)
        times = [None if each is None else round(each.median_us, 2) for each in found]
        rows.append([*(getattr(row.shape, name) for name in SHAPE), *times])
    source = report.provenance
    return {
        "file": path.stem,
        **{name: source[name] for name in ("commit", "commit_from", "date") if name in source},
        "gpus": source["hardware"].get("gpus"),
        "seed": report.spec.seed if report.spec.source == "random" else None,
        "mode": mode,
        "ranks": report.ranks,
        "dtype": report.spec.dtype,
        "scales": report.spec.scales,
        "fast_accum": report.spec.fast_accum,
        "contenders": names,
        "rows": rows,
    }  # fmt: skip


def main() -> None:
    """Add results to the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    new = [part(path) for path in parser.parse_args().files]
    path = results_file.RESULTS / f"{NAME}.json"
    known = results_file.read(NAME)["figures"]["files"] if path.exists() else []
    names = {each["file"] for each in new}
    parts = [*(each for each in known if each["file"] not in names), *new]
    content = {
        "format": results_file.FORMAT,
        "benchmark": NAME,
        "figures": {"shape": SHAPE, "files": sorted(parts, key=lambda each: each["file"])},
    }
    path.write_text(results_file.laid_out(content) + "\n")


if __name__ == "__main__":
    main()
