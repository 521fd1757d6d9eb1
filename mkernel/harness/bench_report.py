"""The table on the terminal: a line a shape, a column a contender, then mkernel's figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from rich.text import Text

from mkernel.harness.contenders import OURS, PROMISING
from mkernel.harness.results import Entry, Report, Row
from mkernel.harness.spec import GEMMS
from mkernel.plan.ops import ALIASES
from mkernel.tabular import Column, Sheet, Unit, in_unit, unit_of

SHORT = {full: alias for alias, full in ALIASES.items()}
_TIMES = (
    "Times are of one call, median over iterations of the slowest rank; gemm, comm, copy: the parts "
    "alone."
)
_RATIOS = (
    "Ratios of T, mkernel's time: rho = max(T_c, T_m) / T; eta = (T_c + T_m - T) / min(T_c, T_m), "
    "where T_c is gemm's time and T_m that of comm or copy; speed-up: the library's sequence / T; "
    "T / gemm, T / best peer: less is better."
)


def legend(*, brief: bool) -> str:
    """Describe the columns of :func:`table`."""
    return (
        f"{_TIMES} T / best peer: below 1, mkernel is faster." if brief else f"{_TIMES} {_RATIOS}"
    )


FIGURES = ("TF/s", "rho", "eta", "/ sequential", "/ gemm", "target", "/ best peer")


def heads(report: Report) -> tuple[list[str], list[str]]:
    """Return the headings of a row's text and of its numbers: a column a contender, then mkernel's
    figures."""
    gemms = all(row.shape.op in GEMMS for row in report.rows)
    sizes = "M x N x K a rank" if gemms else "M x N x K a rank, or sizes"
    names = contenders(report)
    return (
        ["op", sizes, "name", *(["mode"] if _shows_modes(report) else [])],
        [*names, *(FIGURES if "mkernel" in names else ())],
    )


def cells(
    report: Report, row: Row, verdicts: tuple[str, str], unit: Unit | None = None
) -> list[str]:
    """Return a row under those headings.

    Args:
        verdicts: how a target is said to be met or missed.
        unit: of times; None: microseconds with one decimal.
    """
    names = contenders(report)
    return [
        SHORT.get(row.shape.op, row.shape.op),
        size(row),
        row.shape.name,
        *([row.mode] if _shows_modes(report) else []),
        *(cell(row.entries[name], unit) for name in names),
        *(_figures(row, verdicts, unit) if "mkernel" in names else ()),
    ]


def size(row: Row) -> str:
    """Name a row's shape, with the way that mkernel's calls took, where there are several."""
    mine = row.entries.get("mkernel")
    return row.shape.size + (f", {mine.way}" if mine is not None and mine.way else "")


_HEADINGS = {"/ sequential": "speed-up", "/ gemm": "T / gemm", "/ best peer": "T / best peer"}
"""Words for these on a terminal, where no page explains them."""
_OF_DEVICES = frozenset(("TF/s", "rho", "eta", "/ sequential", "/ gemm"))
"""Figures that say how well a device is used: of a CPU that stands for one, they say nothing."""


def table(report: Report, *, brief: bool = False) -> Sheet:
    """Return all rows. A wrong contender has no figure.

    Args:
        brief: without the figures that say something of devices only.
    """
    names = contenders(report)
    texts, numbers = heads(report)
    kept = [
        place
        for place, name in enumerate([*texts, *numbers])
        if not (brief and name in _OF_DEVICES)
    ]
    entries = [row.entries[name] for row in report.rows for name in names]
    unit = unit_of(one.figures.median_us for one in entries if one.figures is not None)
    columns = (
        *(Column(name, key=True) for name in texts),
        *(
            Column(_HEADINGS.get(name, name), right=True, unit=unit if name in names else "")
            for name in numbers
        ),
    )
    drawn = Sheet((columns[place] for place in kept), title(report))
    target = len(texts) + numbers.index("target") if "target" in numbers else None
    for row in report.rows:
        shown = [Text(each) for each in cells(report, row, ("", " missed"), unit)]
        for number, name in enumerate(names, len(texts)):
            if row.entries[name].figures is None:
                shown[number].stylize("red")
        if target is not None and row.meets_target is not None:
            shown[target].stylize("green" if row.meets_target else "red")
        drawn.row(*(shown[place] for place in kept))
    return drawn


def title(report: Report) -> str:
    """Say what was timed, and on what."""
    on = where(report, "CPU ranks") + nodes(report)
    return f"{inputs(report)}, accelerator {report.accelerator}, {on}"


def inputs(report: Report) -> str:
    """Name the inputs' dtype, and how they are scaled."""
    scales = report.spec.scales
    fast = ", fast accumulation" if report.spec.fast_accum else ""
    norm = ", sums with residual and norm" if report.spec.norm else ""
    sums = report.spec.invariant
    partial = f" in {sums.partial_dtype}" if sums is not None and sums.partial_dtype else ""
    promise = f", invariant by {sums.segments} segments{partial}" if sums is not None else ""
    return report.spec.dtype + (f" with {scales} scales{fast}" if scales else "") + norm + promise


def where(report: Report, ranks: str) -> str:
    """Name the devices, and how the ranks have them; ``ranks``: what these are where there is none."""
    hardware = report.provenance["hardware"]
    gpus = hardware.get("gpus")
    if not gpus:
        return f"{report.ranks} {ranks}"
    shared = hardware.get("shared")
    count = f"{len(gpus)}x {gpus[0]}"
    return f"{count} ({shared})" if shared else f"{report.ranks} of {count}"


def nodes(report: Report) -> str:
    """Say how many nodes there were, and what was between them or, where there was one, between
    ranks."""
    if report.nodes == 1:
        return f", {report.carrier} between ranks" if report.carrier else ""
    return f" on {report.nodes} emulated nodes, {report.carrier or 'nothing'} between them"


def _shows_modes(report: Report) -> bool:
    return report.spec.modes != ("kernel",)


FEW_ROWS = 512
"""Below so many rows a bar of invariant results is another one."""


def promise(report: Report) -> list[str]:
    """Say of each op and mode what invariant results cost: our time over that of our fastest way
    without them, and over the unfused way's (geometric means, rows below :data:`FEW_ROWS` apart)."""
    found = []
    kinds: dict[str, list[dict[str, float]]] = {}
    for row in report.rows if report.spec.invariant is not None else ():
        kinds.setdefault(_kind(row), []).append(_medians(row))
    for kind, rows in kinds.items():
        over = [_over(each, (n for n in OURS if n not in PROMISING)) for each in rows]
        ahead = [_over(each, PROMISING[1:]) for each in rows]
        parts = [
            f"{statistics.geometric_mean(ratios):.3f} of {what} ({len(ratios)} of {len(rows)} rows, "
            f"{min(ratios):.3f} to {max(ratios):.3f})"
            for what, each in (("our time without", over), ("the unfused way's", ahead))
            if (ratios := [ratio for ratio in each if ratio is not None])
        ]
        if parts:
            found.append(f"{kind}: {'; '.join(parts)}")
    return found


def _kind(row: Row) -> str:
    m, kind = row.shape.m, f"{SHORT.get(row.shape.op, row.shape.op)}, {row.mode}"
    if m is None:
        return kind
    return f"{kind}, below {FEW_ROWS} rows" if m < FEW_ROWS else f"{kind}, from {FEW_ROWS} rows on"


def _medians(row: Row) -> dict[str, float]:
    entries = row.entries.items()
    return {name: each.figures.median_us for name, each in entries if each.figures is not None}


def _over(medians: dict[str, float], others: Iterable[str]) -> float | None:
    """Return invariant results' time over the least of others'."""
    least = min((medians[name] for name in others if name in medians), default=None)
    mine = medians.get(PROMISING[0])
    return None if least is None or mine is None else mine / least


def contenders(report: Report) -> list[str]:
    """Return the contenders that were there in any row."""
    return [
        name
        for name in report.spec.contenders
        if name == "mkernel" or any(row.entries[name].state != "absent" for row in report.rows)
    ]


def cell(entry: Entry, unit: Unit | None = None) -> str:
    """Write a contender's time, or why it has none."""
    if entry.figures is not None:
        time_us = entry.figures.median_us
        return f"{time_us:.1f}" if unit is None else in_unit(time_us, unit)
    return {"wrong": entry.why, "failed": "failed"}.get(entry.state, "-")


def verdict(report: Report) -> Text:
    """Return the last line: what was wrong, or that nothing was."""
    lines = []
    for row in report.rows:
        for name in row.wrong:
            entry = row.entries[name]
            lines.append(
                entry.why
                if entry.state == "failed"
                else f"{name} at {row.shape.op} {row.shape.size}: {entry.why} "
                f"(limit {entry.limit:.1e})"
            )
        mine = row.entries.get("mkernel")
        if mine is not None and mine.state == "absent":
            lines.append(f"mkernel at {row.shape.op} {row.shape.size}: {mine.why}")
    if lines:
        return Text("FAILED  " + "; ".join(lines), style="bold red")
    aimed = [row.meets_target for row in report.rows if row.meets_target is not None]
    ahead = [row.to_best <= 1 for row in report.rows if row.to_best is not None]
    parts = ["PASSED  every result of every contender was right"]
    if aimed:
        parts.append(f"{sum(aimed)} of {len(aimed)} targets met")
    if ahead:
        parts.append(f"ahead of the best peer in {sum(ahead)} of {len(ahead)}")
    return Text("; ".join(parts), style="bold green")


def _figures(row: Row, verdicts: tuple[str, str], unit: Unit | None) -> list[str]:
    mine = row.entries["mkernel"].figures
    if mine is None:
        return ["-"] * len(FIGURES)
    target = "" if row.target is None else f"{row.target:g}"
    if row.target_us is not None:
        target = f"{row.target_us:g} us"
    if row.meets_target is not None:
        target += verdicts[0] if row.meets_target else verdicts[1]
    slow = unit is not None and (mine.tflops or 1.0) < 1.0
    values = (
        (mine.tflops, ".3f" if slow else ".1f"), (mine.rho, ".2f"), (mine.eta, ".2f"),
        (mine.speedup, ".2f"), (mine.to_gemm, ".3f"), (row.to_best, ".2f"),
    )  # fmt: skip
    *most, best = ("-" if value is None else format(value, form) for value, form in values)
    return [*most, target, best]
