"""The page of measured numbers, made from the committed results alone: what misses comes first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mkernel.bench.report import SHORT, contenders, short
from mkernel.bench.results import Report, Row, read
from mkernel.errors import InputFileError

HEAD = """# Measured numbers

Made from the files of `{folder}` by `mkernel bench --render {folder}`; do not edit. Times are
microseconds: the median over iterations of the slowest rank. Inputs are new and outputs poisoned in
every iteration, the L2 cache is flushed, and a barrier of all ranks comes right before each start. All
contenders of a table took turns in one process group, and every result was checked against float64.
`gemm`, `comm` and `copy` are the parts alone: the product (T_c), the library's collective and the copy
engines (T_m is the faster of the two). Of mkernel's time T, rho = max(T_c, T_m) / T and
eta = (T_c + T_m - T) / min(T_c, T_m).
"""


def page(folder: Path) -> str:
    """Markdown of every benchmark result in a folder. InputFileError: none there."""
    reports = [
        (path, report)
        for path in sorted(folder.glob("*.json"))
        if (report := read(path)) is not None
    ]
    if not reports:
        raise InputFileError(f"--render {folder}: no result of `mkernel bench` there")
    parts = [HEAD.format(folder=folder), *_misses(reports)]
    for path, report in reports:
        parts += ["", *_section(path, report)]
    return "\n".join(parts) + "\n"


def _misses(reports: Sequence[tuple[Path, Report]]) -> list[str]:
    found = []
    for path, report in reports:
        for row in report.rows:
            found += [f"- {path.stem}: {_where(row)}: {text}" for text in _failures(row)]
    return ["## What misses its target", "", *(found or ["Nothing."])]


def _failures(row: Row) -> list[str]:
    found = [f"{name} {row.entries[name].state}: {row.entries[name].why}" for name in row.wrong]
    mine = row.entries.get("mkernel")
    if mine is None:
        return found
    if mine.figures is None:
        return [*found, f"mkernel has no figure: {mine.why}"]
    if row.meets_target is False:
        found.append(f"{mine.figures.to_gemm:.3f} of the product alone, target {row.target:g}")
    if row.to_best is not None and row.to_best > 1:
        found.append(f"{row.to_best:.3f} of the best peer ({row.best_peer})")
    return found


def _section(path: Path, report: Report) -> list[str]:
    source = report.provenance
    hardware, software = source["hardware"], source["software"]
    gpus = hardware.get("gpus") or ()
    on = f"{report.ranks} of {len(gpus)}x {gpus[0]}" if gpus else f"{report.ranks} processes"
    versions = [f"{name} {version}" for name, version in software.items()]
    versions += [
        f"{name} {hardware[name]}" for name in ("driver", "cuda", "nccl") if hardware.get(name)
    ]
    dirty = " with uncommitted changes: do not quote" if source["dirty"] else ""
    names = contenders(report)
    mine = "mkernel" in names
    extra = (
        ["TF/s", "rho", "eta", "/ sequential", "/ gemm", "target", "/ best peer"] if mine else []
    )
    head = ["op", "M x N x K a rank", "name", *names, *extra]
    lines = [
        f"## {path.stem}",
        "",
        f"{report.spec.dtype}, B {report.spec.layout}-major, accelerator `{report.accelerator}`, "
        f"{report.spec.iterations} iterations, on {on} ({hardware['cpu']}, {hardware['cores']} cores), "
        f"{', '.join(versions)}. {source['date']}, commit `{source['commit'][:12]}`{dirty}.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * 3 + "--:|" * (len(head) - 3),
    ]
    for row in report.rows:
        cells = [SHORT.get(row.shape.op, row.shape.op), row.shape.size, row.shape.name]
        cells += [_cell(row, name) for name in names]
        cells += _figures(row) if mine else []
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cell(row: Row, name: str) -> str:
    entry = row.entries[name]
    if entry.figures is None:
        return short(entry)
    return f"{entry.figures.median_us:.1f}"


def _figures(row: Row) -> list[str]:
    mine = row.entries["mkernel"].figures
    if mine is None:
        return ["-"] * 7
    target = "" if row.target is None else f"{row.target:g}"
    if row.meets_target is not None:
        target += " met" if row.meets_target else " **missed**"
    values = (
        (mine.tflops, ".1f"), (mine.rho, ".2f"), (mine.eta, ".2f"), (mine.speedup, ".2f"),
        (mine.to_gemm, ".3f"),
    )  # fmt: skip
    return [
        *("-" if value is None else format(value, form) for value, form in values),
        target,
        "-" if row.to_best is None else f"{row.to_best:.2f}",
    ]


def _where(row: Row) -> str:
    named = f" ({row.shape.name})" if row.shape.name else ""
    return f"{SHORT.get(row.shape.op, row.shape.op)} {row.shape.size}{named}"
