"""The table on the terminal: a line a shape, a column a contender, then mkernel's figures."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from mkernel.harness.results import Entry, Report, Row
from mkernel.harness.spec import GEMMS
from mkernel.plan.ops import ALIASES

SHORT = {full: alias for alias, full in ALIASES.items()}
LEGEND = (
    "us: of one call, median over iterations of the slowest rank; gemm, comm, copy: the parts alone "
    "(T_c, T_m); rho = max(T_c, T_m) / T; eta = (T_c + T_m - T) / min(T_c, T_m)"
)


def table(report: Report) -> Table:
    """All rows. A wrong contender has no figure."""
    drawn = Table(title=title(report), title_justify="left", box=box.SIMPLE_HEAD)
    names = contenders(report)
    drawn.add_column("op", no_wrap=True)
    drawn.add_column(size_column(report), no_wrap=True)
    drawn.add_column("name", no_wrap=True)
    several = shows_modes(report)
    if several:
        drawn.add_column("mode", no_wrap=True)
    for name in names:
        drawn.add_column(f"{name} us", justify="right", no_wrap=True)
    mine = "mkernel" in names
    extra = ("TF/s", "rho", "eta", "/sequential", "/gemm", "target", "/best peer") if mine else ()
    for name in extra:
        drawn.add_column(name, justify="right", no_wrap=True)
    for row in report.rows:
        cells = [SHORT.get(row.shape.op, row.shape.op), row.shape.size, row.shape.name]
        cells += [row.mode] if several else []
        drawn.add_row(
            *cells, *(cell(row.entries[name]) for name in names), *(_figures(row) if mine else ())
        )
    return drawn


def title(report: Report) -> str:
    """What, on what."""
    hardware = report.provenance["hardware"]
    gpus = hardware.get("gpus")
    where = f"{report.ranks} of {len(gpus)}x {gpus[0]}" if gpus else f"{report.ranks} CPU ranks"
    return f"{report.spec.dtype}, accelerator {report.accelerator}, {where}{nodes(report)}"


def nodes(report: Report) -> str:
    """How many nodes there were, and what was between them; nothing where there was one."""
    if report.nodes == 1:
        return ""
    return f" on {report.nodes} emulated nodes, {report.carrier or 'nothing'} between them"


def size_column(report: Report) -> str:
    """The heading of the column of sizes."""
    gemms = all(row.shape.op in GEMMS for row in report.rows)
    return "M x N x K a rank" if gemms else "M x N x K a rank, or sizes"


def shows_modes(report: Report) -> bool:
    """Whether a row has to say its mode."""
    return report.spec.modes != ("kernel",)


def contenders(report: Report) -> list[str]:
    """Those that were there in any row."""
    return [
        name
        for name in report.spec.contenders
        if name == "mkernel" or any(row.entries[name].state != "absent" for row in report.rows)
    ]


def cell(entry: Entry) -> Text:
    """A contender's time, or why it has none."""
    if entry.figures is None:
        return Text(short(entry), style="red")
    return Text(f"{entry.figures.median_us:.1f}")


def short(entry: Entry) -> str:
    """What stands in the place of a figure."""
    return {"wrong": entry.why, "failed": "failed"}.get(entry.state, "-")


def verdict(report: Report) -> Text:
    """The last line: what was wrong, or that nothing was."""
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


def _figures(row: Row) -> list[Text]:
    mine = row.entries["mkernel"].figures
    if mine is None:
        return [Text("-")] * 7
    target = Text("" if row.target is None else f"{row.target:g}")
    if row.meets_target is not None:
        target.stylize("green" if row.meets_target else "red")
        target.append("" if row.meets_target else " missed")
    return [
        _number(mine.tflops, ".1f"),
        _number(mine.rho, ".2f"),
        _number(mine.eta, ".2f"),
        _number(mine.speedup, ".2f"),
        _number(mine.to_gemm, ".3f"),
        target,
        _number(row.to_best, ".2f"),
    ]


def _number(value: float | None, form: str) -> Text:
    return Text("-" if value is None else format(value, form))
