"""The page of measured numbers, made from the committed results alone: gains, then what misses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from mkernel.errors import InputFileError
from mkernel.harness import conditions, gpu_tests
from mkernel.harness.bench_report import SHORT, cells, heads, inputs, nodes, where
from mkernel.harness.results import Report, Row, read

HEAD = """# Measured numbers

Made from the files of `{folder}` by `mkernel bench --render {folder}`; do not edit. Times are
microseconds of one call: the median over iterations of the slowest rank. Before every turn inputs are
drawn, outputs poisoned and the L2 cache is flushed; each table says how its turns start and what their
times hold. All contenders of a table took turns in one process group, and the results of every timed
turn were checked against float64. `gemm`, `comm` and `copy` are the parts alone: the product (T_c), the
library's collective and the copy engines (T_m is the faster of the two). Of mkernel's time T,
rho = max(T_c, T_m) / T and eta = (T_c + T_m - T) / min(T_c, T_m).
"""


_VERDICTS = (" met", " **missed**")


def page(folder: Path) -> str:
    """Markdown of every benchmark result in a folder. InputFileError: none there."""
    reports = [
        (path, report)
        for path in sorted(folder.glob("*.json"))
        if (report := read(path)) is not None
    ]
    if not reports:
        raise InputFileError(f"--render {folder}: no result of `mkernel bench` there")
    newest = _newest([report for _, report in reports])
    parts = [HEAD.format(folder=folder), *_gains(reports, newest), "", *_misses(reports)]
    tests = gpu_tests.read(folder / gpu_tests.FILE)
    if tests is not None:
        parts += ["", *gpu_tests.section(tests)]
    for path, report in reports:
        parts += ["", *_section(path, report, newest)]
    return "\n".join(parts) + "\n"


def _newest(reports: Sequence[Report]) -> str:
    """The commit of the latest results; of several of one day the one with most files."""
    commits = [report.provenance["commit"] for report in reports]
    _, _, newest = max(
        (str(report.provenance["date"]), commits.count(commit), str(commit))
        for report, commit in zip(reports, commits, strict=True)
    )
    return newest


def _not_repeated(report: Report, newest: str) -> bool:
    return bool(report.provenance["commit"] != newest)


def _gains(reports: Sequence[tuple[Path, Report]], newest: str) -> list[str]:
    lines = [
        "## What a user gains",
        "",
        "Time of the best peer of the same run (NCCL + cuBLAS, torch symm_mem) over mkernel's: above 1",
        "mkernel is faster. *geometric mean*, *least* and *most* over the shapes of a table below.",
        "",
        "| results | ranks | mode | op | shapes | geometric mean | least | most | mkernel ahead in |",
        "|---|--:|---|---|--:|--:|--:|--:|--:|",
    ]
    found = False
    for path, report in reports:
        stale = " (not repeated)" if _not_repeated(report, newest) else ""
        for mode in report.spec.modes:
            timed = (
                f"{mode}, launches counted" if mode == "kernel" and report.spec.launches else mode
            )
            for op in dict.fromkeys(row.shape.op for row in report.rows):
                gains = [
                    1 / row.to_best
                    for row in report.rows
                    if row.shape.op == op and row.mode == mode and row.to_best is not None
                ]
                if not gains:
                    continue
                found = True
                mean = statistics.geometric_mean(gains)
                ahead = sum(gain >= 1 for gain in gains)
                lines.append(
                    f"| {path.stem}{stale} | {report.ranks} | {timed} | {SHORT.get(op, op)} "
                    f"| {len(gains)} | {mean:.2f} | {min(gains):.2f} | {max(gains):.2f} "
                    f"| {ahead} of {len(gains)} |"
                )
    return lines if found else [*lines[:2], "No result has a peer."]


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
    if row.meets_target is False and row.target_us is not None:
        found.append(f"{mine.figures.median_us:.0f} us, target {row.target_us:g}")
    elif row.meets_target is False:
        found.append(f"{mine.figures.to_gemm:.3f} of the product alone, target {row.target:g}")
    if row.to_best is not None and row.to_best > 1:
        found.append(f"{row.to_best:.3f} of the best peer ({row.best_peer})")
    return found


def _section(path: Path, report: Report, newest: str) -> list[str]:
    source = report.provenance
    hardware, software = source["hardware"], source["software"]
    on = where(report, "processes") + nodes(report)
    versions = [f"{name} {version}" for name, version in software.items()]
    versions += [
        f"{name} {hardware[name]}" for name in ("driver", "cuda", "nccl") if hardware.get(name)
    ]
    texts, figures = heads(report)
    seed = f" with seed {report.spec.seed}" if report.spec.source == "random" else ""
    drawn = f", shapes `{report.spec.source}`{seed}" if report.spec.source else ""
    fixed = all(row.shape.layout is None for row in report.rows)
    layout = f"B {report.spec.layout}-major, " if fixed else ""
    return [
        f"## {path.stem}",
        "",
        f"{inputs(report)}, {layout}accelerator `{report.accelerator}`, "
        f"{report.spec.iterations} iterations, on {on} ({hardware['cpu']}, {hardware['cores']} cores), "
        f"{', '.join(versions)}{drawn}. {source['date']}.",
        *(f"- {sentence}" for sentence in conditions.sentences(report)),
        *(
            [f"- **Not repeated** at `{newest[:12]}`, the commit of other results."]
            if _not_repeated(report, newest)
            else []
        ),
        "",
        "| " + " | ".join((*texts, *figures)) + " |",
        "|" + "---|" * len(texts) + "--:|" * len(figures),
        *("| " + " | ".join(cells(report, row, _VERDICTS)) + " |" for row in report.rows),
    ]


def _where(row: Row) -> str:
    named = f" ({row.shape.name})" if row.shape.name else ""
    mode = "" if row.mode == "kernel" else f", {row.mode}"
    return f"{SHORT.get(row.shape.op, row.shape.op)} {row.shape.size}{named}{mode}"
