"""``mkernel doctor``: what is usable here, what is not, and what to do about it."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mkernel.doctor import Report, SettingRow, examine, setting_rows


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
            Console().print(settings_table(rows))
        return
    report = examine()
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        Console().print(report_table(report))
    if not report.healthy:
        raise typer.Exit(1)


def report_table(report: Report) -> Table:
    """A line for every backend, provider and tool."""
    verdict = "ready to run" if report.healthy else "no accelerator with a NIC path is usable"
    table = Table(title=f"mkernel doctor: {verdict}", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("kind", "name", "usable"):
        table.add_column(name, no_wrap=True)
    for name in ("detail", "what to do"):
        table.add_column(name, min_width=28)
    for row in report.rows:
        usable = Text("yes", style="green") if row.usable else Text("no", style="red")
        table.add_row(row.kind, Text(row.name), usable, Text(row.detail), Text(row.remedy))
    return table


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
