"""``mkernel doctor``: what is usable here, what is not, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated

import typer
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mkernel.cli.terminal import Terminal
from mkernel.doctor import Kind, Report, SettingRow, examine, setting_rows

_HEADINGS: dict[Kind, str] = {
    "auto": "What `auto` stands for",
    "accelerator": "Accelerators",
    "nic": "NICs",
    "fabric": "NICs",
    "library": "Software and machine",
    "build": "Software and machine",
    "cpu": "Software and machine",
    "memory": "Software and machine",
    "software": "Software and machine",
}


def command(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    settings: Annotated[
        bool, typer.Option("--settings", help="Print every setting and where it came from.")
    ] = False,
) -> None:
    """Check backends, providers and tools. Exit code 1 if nothing could run."""
    if settings:
        rows = setting_rows()
        if as_json:
            typer.echo(json.dumps({"settings": [row.model_dump(mode="json") for row in rows]}))
        else:
            Terminal().print(settings_table(rows))
        return
    report = examine()
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        Terminal(highlight=False).print(*report_lines(report), sep="\n")
    if not report.healthy:
        raise typer.Exit(1)


def report_lines(report: Report) -> Iterator[RenderableType]:
    """A paragraph for every backend, provider and tool, and what to do below it.

    Nothing stands beside the paragraph but the verdict, so that all of it is there however narrow the
    terminal is.
    """
    verdict = "ready to run" if report.healthy else "no accelerator with a NIC path is usable"
    yield Text(f"mkernel doctor: {verdict}", style="bold")
    for kind, rows in groupby(report.rows, key=lambda row: _HEADINGS[row.kind]):
        yield Text(f"\n{kind}")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(width=5, justify="right", no_wrap=True)
        grid.add_column(overflow="fold")
        for row in rows:
            usable = Text("yes", style="green") if row.usable else Text("no", style="red")
            told = Text.assemble((row.name, "bold"), "  ", row.detail)
            if row.remedy:
                told.append(f"\n→ {row.remedy}", style="yellow")
            grid.add_row(usable, told)
        yield grid


def settings_table(rows: list[SettingRow]) -> Table:
    """A line for every setting."""
    table = Table(title="mkernel settings", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("setting", "value", "from"):
        table.add_column(name, overflow="fold")
    table.add_column("meaning, and the variable that sets it", overflow="fold")
    for row in rows:
        meaning = Text.assemble(row.description, "\n", (row.environment, "dim"))
        table.add_row(row.name, Text(str(row.value)), row.source, meaning)
    return table
