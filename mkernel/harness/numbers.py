"""The page of measured numbers, made from the committed results alone: gains, then what misses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mkernel.errors import InputFileError
from mkernel.harness import conditions, gains, gpu_tests
from mkernel.harness.bench_report import SHORT, cells, heads, inputs, nodes, promise, where
from mkernel.harness.gains import Series
from mkernel.harness.results import Report, Row, read

HEAD = """# Measured numbers

Made from the files of `{folder}` by `mkernel bench --render {folder}`; do not edit. Times are
microseconds of one call: the median over iterations of the slowest rank. Before every turn inputs are
drawn, outputs poisoned and the L2 cache is flushed; each table says how its turns start and what their
times hold. All contenders of a table took turns in one process group. Of every timed turn results were
compared with float64: of a turn of one call its own, of a loop or a graph those of the calls whose
outputs are kept, and of a large result a sample of its rows. `gemm`, `comm` and `copy` are the parts
alone: the product (T_c), the library's collective and the copy engines (T_m is the faster of the two).
Of mkernel's time T, rho = max(T_c, T_m) / T and eta = (T_c + T_m - T) / min(T_c, T_m).
"""

GAINS = """## What a user gains

Time of the best peer of the same run over mkernel's: above 1 mkernel is faster. The table has the
newest file of each kind (op, mode, sizes, operands, ranks, nodes and card), the newest first; {newest}
of {all} files are of the newest commit, `{commit}`. *Beside* names the peers that ran, and in how many
rows where that is not all. *Mean* is the geometric one over the rows that have a ratio; those that have
none are named below. It is told again for rows whose best peer takes less than {low:g} us, up to
{high:g} us, and longer; *by time* is the peers' summed time over mkernel's. *Spent*: constants were
fitted to the seed of these shapes or choices were made by it; *held out*: it was used for nothing
before; *fitted to*: constants were fitted to these sizes or choices were made by them. *Lost*: the
commit is not in this history, which was rewritten afterwards.
"""


_WHOLE = {
    gains.WHOLE_MODELS: (
        "The blocks of a Llama, tensor parallel with sequence parallelism",
        "`torch`: torch's plan and NCCL; `async`: torch's micro-pipeline pass. Microseconds of a pass; "
        "the file has the same without communication, memory and spreads.",
    ),
    gains.WHOLE_LAYERS: (
        "A gated MLP and the projections of an attention block, of Llama-3-70B",
        "`library`: torch's product and NCCL's collective; `symm_mem`: torch's fused ops. Microseconds "
        "of a call in a loop of 20.",
    ),
}
"""The subject of a file of figures by its name, and how to read its table."""
_VERDICTS = (" met", " **missed**")


def page(folder: Path) -> str:
    """Write Markdown of every benchmark result in a folder. InputFileError: none there, or no such
    folder."""
    if not folder.is_dir():
        state = "is no folder" if os.path.lexists(folder) else "no such folder"
        raise InputFileError(
            f"--render {folder}: {state}; name one with results of `mkernel bench`"
        )
    series = gains.all_series(folder)
    newest = gains.newest(series)
    files = {each.file for each in newest}
    reports = [
        (path, report)
        for path in sorted(folder.glob("*.json"))
        if path.stem in files and (report := read(path)) is not None
    ]
    if not reports:
        raise InputFileError(f"--render {folder}: no result of `mkernel bench` there")
    commit = _newest_commit(newest)
    parts = [HEAD.format(folder=folder), *_gains(newest, commit), "", *_without_ratio(newest)]
    parts += ["", *_misses(reports, newest), "", *_older(series)]
    tests = gpu_tests.read(folder / gpu_tests.FILE)
    if tests is not None:
        parts += ["", *gpu_tests.section(tests)]
    for path, report in reports:
        parts += ["", *_section(path, report, commit)]
    for file in gains.WHOLE:
        parts += _whole(file, [each for each in newest if each.file == file])
    return "\n".join(parts) + "\n"


def _newest_commit(series: Sequence[Series]) -> str:
    """Return the commit of the latest results; of several of one day the one with most."""
    commits = [each.commit for each in series]
    return max((each.date, commits.count(each.commit), each.commit) for each in series)[2]


def _gains(series: Sequence[Series], commit: str) -> list[str]:
    files = {each.file: each.commit for each in series}
    low, high = gains.LIMITS_US
    head = GAINS.format(
        newest=sum(each == commit for each in files.values()), all=len(files), commit=commit[:12],
        low=low, high=high,
    )  # fmt: skip
    lines = [
        head,
        "| results | shapes | on | mode | beside | op | rows | mean | least | most | ahead "
        f"| < {low:g} us | {low:g} to {high:g} us | > {high:g} us | by time | commit, date |",
        "|---|---|---|---|---|---|" + "--:|" * 9 + "---|",
    ]
    compared = [each for each in series if each.ratios]
    for each in compared:
        parts = [(SHORT.get(op, op), each.of(op)) for op in each.ops]
        lines += [_gain(name, part) for name, part in parts if part.ratios]
        if len(parts) > 1:
            lines.append(_gain("**all**", each))
    if not compared:
        return [*lines[:1], "No result has a peer."]
    alone = dict.fromkeys(each.file for each in series if not each.ratios)
    if alone:
        lines += ["", f"No peer ran in {', '.join(alone)}: tables below."]
    return lines


def _gain(op: str, one: Series) -> str:
    ratios = one.ratios
    rows = len(one.rows)
    beside = ", ".join(
        name if count == rows else f"{name} ({count})" for name, count in one.peers.items()
    )
    shapes = one.shapes if one.inputs == "bfloat16" else f"{one.shapes}, {one.inputs}"
    cells = (
        one.file, shapes, one.on, one.mode, beside, op,
        str(rows) if len(ratios) == rows else f"{len(ratios)} of {rows}",
        f"{gains.mean(ratios):.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}",
        f"{sum(ratio >= 1 for ratio in ratios)} of {len(ratios)}",
        *(f"{gains.mean(band):.2f} ({len(band)})" if band else "" for band in gains.bands(one.rows)),
        f"{gains.by_time(one.rows):.2f}", one.measured,
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _without_ratio(series: Sequence[Series]) -> list[str]:
    found = [
        f"- {each.file}, {each.mode}: {SHORT.get(row.op, row.op)} {row.size}: {row.why}"
        for each in series
        if each.ratios
        for row in each.rows
        if row.ratio is None
    ]
    return ["## Rows without a ratio", "", *(found or ["None."])]


def _older(series: Sequence[Series]) -> list[str]:
    lines = [
        "## Older results",
        "",
        "Files whose every row was measured again on the same card, beside the same peers. Their "
        "tables are not on this page.",
        "",
        "| results | shapes | on | mode | rows | mean | least | commit, date | measured again in |",
        "|---|---|---|---|--:|--:|--:|---|---|",
    ]
    found = []
    for each in series:
        later = gains.newer(each, series)
        if later is None:
            continue
        ratios = each.ratios
        mean = f"{gains.mean(ratios):.2f} | {min(ratios):.2f}" if ratios else "- | -"
        found.append(
            f"| {each.file} | {each.shapes} | {each.on} | {each.mode} "
            f"| {len(each.rows)} | {mean} | {each.measured} | {later.file} |"
        )
    return [*lines, *found] if found else [*lines[:2], "None."]


def _whole(file: str, series: Sequence[Series]) -> list[str]:
    """Write the table of models, or of layers of several ops, whose file is no report."""
    if not series:
        return []
    one = series[0]
    peers = sorted({name for each in series for name in each.peers})
    lines = [
        "",
        f"## {file}",
        "",
        f"{_WHOLE[file][0]}, {one.on}"
        f"{'' if one.card else ' (which one was not recorded)'}, commit `{one.commit[:12]}`, "
        f"{one.date}. {_WHOLE[file][1]} The cache is not flushed.",
        "",
        f"| {file.removeprefix('whole_').removesuffix('s')} | size | mode | "
        + " | ".join([*peers, "mkernel", "best peer / mkernel"])
        + " |",
        "|---|---|---|" + "--:|" * (len(peers) + 2),
    ]
    for each in series:
        for row in each.rows:
            times = [row.peers_us.get(name) for name in peers]
            shown = ["-" if us is None else f"{us:.1f}" for us in (*times, row.mine_us)]
            ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
            lines.append(f"| {row.op} | {row.size} | {each.mode} | {' | '.join(shown)} | {ratio} |")
    return lines


def _misses(reports: Sequence[tuple[Path, Report]], series: Sequence[Series]) -> list[str]:
    found = [
        f"- {each.file}: {row.op} {row.size}, {each.mode}: {1 / row.ratio:.3f} of the best peer "
        f"({min(row.peers_us, key=row.peers_us.__getitem__)})"
        for each in series
        for row in each.rows
        if each.file in gains.WHOLE and row.ratio is not None and row.ratio < 1
    ]
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
        *(f"- {sentence}" for sentence in (*conditions.sentences(report), *promise(report))),
        *(
            [f"- **Not repeated** at `{newest[:12]}`, the newest commit of other results."]
            if source["commit"] != newest
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
