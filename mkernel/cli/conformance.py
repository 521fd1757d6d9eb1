"""``mkernel conformance``: a check that a backend keeps its contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mkernel.cli import terminal
from mkernel.cli.terminal import Terminal
from mkernel.conformance import render
from mkernel.conformance.check import Check, Report, Result
from mkernel.conformance.kit import Kit, kit_for, listed
from mkernel.errors import ArgumentError
from mkernel.tabular import Column, Sheet


def command(
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="Judge this accelerator backend, a name or module:attribute; or with a comma between "
            "two, worlds of unlike nodes."
        ),
    ] = None,
    nic: Annotated[
        str | None, typer.Option(help="Judge this NIC backend, a name or module:attribute.")
    ] = None,
    verbs: Annotated[
        str | None,
        typer.Option(
            help="Use this verbs provider: soft, system, or a library's path. [MKERNEL_VERBS]"
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Take fewer shapes, worlds and repeats: about a minute.")
    ] = False,
    check: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run this check alone; may be given several times."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Draw by this seed.")] = 0,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write JSON; - is stdout.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML; - is stdout.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print the checks and stop.")] = False,
    faults: Annotated[
        bool,
        typer.Option(
            "--faults",
            help="Judge the checks instead: whether each catches the faults planted for it.",
        ),
    ] = False,
) -> None:
    """Judge a backend. Exit code 0 only if no check failed and at least one passed."""
    if list_:
        Terminal().print(_checks(listed(accelerator, nic)))
        return
    if faults:
        _judge_faults(nic, check or ())
        return
    if str(json) == "-" and str(junit) == "-":
        raise ArgumentError("--junit", "-", "a file, as --json writes to stdout")
    kit = kit_for(accelerator, nic, verbs=verbs, quick=quick, seed=seed)
    if check:
        kit = kit.only(check)
    piped = "-" in (str(json), str(junit))
    console = Terminal(quiet=piped, highlight=False)
    report = _run(kit, console)
    console.print(render.table(report))
    console.print(render.summary(report), style="bold")
    if json is not None:
        _write(json, render.as_json(report) + "\n")
    if junit is not None:
        _write(junit, render.junit(report))
    raise typer.Exit(0 if report.passed else 1)


def _run(kit: Kit, console: Console) -> Report:
    """Run the kit and report progress, and failures at once."""
    shown = Terminal(stderr=True) if console.quiet else console
    total = len(kit.checks)
    with terminal.progress(
        shown, f"{total} checks; the first is {kit.checks[0].name}", total
    ) as tell:

        def judged(result: Result) -> None:
            line = f"{result.name} {result.outcome}, {result.seconds:.1f} s"
            if result.outcome == "failed" and console.is_terminal:
                console.print(line, style="red")
            tell(line)

        return kit.run(judged)


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        typer.echo(text, nl=False)
    else:
        render.write(path, text)


def _checks(by_kind: Mapping[str, Sequence[Check]]) -> Sheet:
    drawn = Sheet(
        (Column("of", key=True), Column("check", key=True), Column("promise", prose=True))
    )
    for kind, checks in by_kind.items():
        for check in checks:
            drawn.row(kind, check.name, check.promise)
    return drawn


def _judge_faults(nic: str | None, only: Sequence[str]) -> None:
    from mkernel.conformance import planted

    console = Terminal()
    total = sum(map(len, planted.wanted(nic, only).values()))
    with terminal.progress(console, f"{total} faults to catch", total) as tell:
        rows = planted.judge(nic, only, lambda row: tell(f"{row.check} on {row.fault}"))
    console.print(planted.table(rows))
    for why in dict.fromkeys(row.message for row in rows if row.caught is None):
        console.print(f"not planted: {why}")
    raise typer.Exit(0 if planted.passed(rows) else 1)
