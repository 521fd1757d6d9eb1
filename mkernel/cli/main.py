"""The ``mkernel`` command's entry point and its exit codes.

0: done, PASSED. 1: FAILED, or the world broke in mid-run. 2: bad input; nothing was started.
130: Ctrl-C.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from mkernel.cli import bench, conformance, doctor, plan, probe, run
from mkernel.errors import MkernelError, WorldError

app = typer.Typer(
    name="mkernel",
    help="Fused communication+compute kernels across accelerators and NICs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run.command)
app.command("bench")(bench.command)
app.command("plan")(plan.command)
app.command("probe")(probe.command)
app.command("doctor")(doctor.command)
app.command("conformance")(conformance.command)


def main() -> None:
    """Run the command line; turn errors into one line on stderr and an exit code."""
    stderr = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        app()
    except KeyboardInterrupt:
        stderr.print("interrupted")
        sys.exit(130)
    except MkernelError as error:
        stderr.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        sys.exit(1 if isinstance(error, WorldError) else 2)
