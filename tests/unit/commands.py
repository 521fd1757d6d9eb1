"""Runs a subcommand of the command line in this process."""

from __future__ import annotations

from collections.abc import Callable

import typer
from typer.testing import CliRunner


def run(command: Callable[..., None], *arguments: str, code: int = 0) -> str:
    """What ``command`` prints on stdout. Its error is raised here; else it must exit with ``code``."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code
    return result.stdout
