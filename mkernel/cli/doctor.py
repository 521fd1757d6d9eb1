"""``mkernel doctor``: what is usable here, what is not, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mkernel.cli.options import AsJson
from mkernel.cli.terminal import Terminal, write_json, writing
from mkernel.doctor import Kind, Report, SettingRow, examine, setting_rows
from mkernel.errors import ArgumentError, MkernelError
from mkernel.tabular import Column, Sheet
from mkernel.user_files import write_file

_HEADINGS: dict[Kind, str] = {
    "setting": "Settings",
    "auto": "What `auto` stands for",
    "accelerator": "Accelerators",
    "device": "Accelerators",
    "nic": "NICs",
    "fabric": "NICs",
    "library": "Software and machine",
    "build": "Software and machine",
    "cpu": "Software and machine",
    "memory": "Software and machine",
    "software": "Software and machine",
}


def command(
    as_json: AsJson = False,
    settings: Annotated[
        bool, typer.Option("--settings", help="Print every setting and where it came from.")
    ] = False,
    report_file: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Write all of it, with versions, topology and the last failure, to one file for a "
            "bug report; - is stdout.",
        ),
    ] = None,
) -> None:
    """Check backends, providers and tools. Exit code 1 if nothing could run."""
    if report_file is not None:
        if as_json or settings:
            raise ArgumentError("--report", report_file, "nothing beside --json or --settings")
        _report(report_file)
        return
    if settings:
        rows = setting_rows()
        if as_json:
            write_json(json.dumps({"settings": [row.model_dump(mode="json") for row in rows]}))
        else:
            Terminal().print(settings_table(rows))
        return
    report = examine()
    if as_json:
        write_json(report.model_dump_json(indent=2))
    else:
        Terminal(highlight=False).print(*report_lines(report), sep="\n")
    if not report.healthy:
        raise typer.Exit(1)


def _report(file: Path) -> None:
    from mkernel.bug_report import collect
    from mkernel.cli.probe import discovered

    notes: tuple[str, ...] = ()
    try:
        found = discovered()
    except MkernelError as error:
        topology: dict[str, Any] | str = str(error)
    else:
        topology = found.topology.model_dump(mode="json", exclude_defaults=True)
        notes = tuple(f"{note.source}: {note.message}" for note in found.notes)
    text = collect(topology, notes).model_dump_json(indent=2)
    if str(file) == "-":
        write_json(text)
        return
    with writing("--report", file):
        write_file(file, text + "\n")
    Terminal().print(
        f"wrote {file}: versions, devices, settings, topology and the last failure. Read it before "
        "you attach it: an error's message quotes what your program raised."
    )


_SIGNS = {
    (True, False): Text("yes", style="green"),
    (True, True): Text("yes", style="green"),
    (False, False): Text("no", style="red"),
    (False, True): Text("-", style="dim"),
}
"""The sign of a row, by whether it is usable, and whether nothing here needs it."""


def report_lines(report: Report) -> Iterator[RenderableType]:
    """Yield a paragraph for every backend, provider and tool, with the remedy below it.

    Only the verdict stands beside the paragraph, so that all of it is visible however narrow the
    terminal is.
    """
    yield Text(f"mkernel doctor: {_verdict(report)}", style="bold")
    shown = [row for row in report.rows if row.asked or row.usable]
    for kind, rows in groupby(shown, key=lambda row: _HEADINGS[row.kind]):
        yield Text(f"\n{kind}")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(width=5, justify="right", no_wrap=True)
        grid.add_column(overflow="fold")
        for row in rows:
            usable = _SIGNS[row.usable, row.optional]
            told = Text.assemble((row.name, "bold"), "  ", row.detail)
            if row.remedy:
                told.append(f"\n→ {row.remedy}", style="dim" if row.optional else "yellow")
            grid.add_row(usable, told)
        yield grid
    if any(row.optional and not row.usable for row in shown):
        yield Text("\n-: not here, and nothing that is ready to run needs it", style="dim")


def _verdict(report: Report) -> str:
    if report.healthy:
        return "ready to run"
    if any(row.kind == "setting" for row in report.rows):
        return "commands refuse what the environment sets"
    return "no accelerator with a NIC path is usable"


def settings_table(rows: list[SettingRow]) -> Sheet:
    """Return a table of every setting: its variable, its value, its origin, its meaning."""
    table = Sheet(
        (
            Column("variable", key=True),
            Column("value"),
            Column("from"),
            Column("meaning", prose=True),
        ),
        "mkernel settings",
    )
    for row in rows:
        table.row(row.environment, shown_value(row), row.source, row.description)
    return table


def shown_value(row: SettingRow) -> str:
    """Return a setting's value as a word."""
    nothing = row.value in (None, "", (), {})
    return "not set" if nothing else str(row.value)
