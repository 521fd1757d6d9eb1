"""The ``mkernel`` command's entry point and its exit codes.

0: done, PASSED. 1: FAILED, the world broke in mid-run, or the system refused something (the disk is
full, no more files may be open, nobody reads stdout). 2: bad input; nothing was started. 128 + N:
signal N, as a shell reports it: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.
"""

from __future__ import annotations

import errno
import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from mkernel import __version__, headers
from mkernel.cli.terminal import LostOutput, Terminal, take_over_streams
from mkernel.errors import MkernelError, WorldError
from mkernel.plan import ops
from mkernel.printable import printable

COMMANDS = ("run", "bench", "plan", "probe", "doctor", "conformance")
"""The subcommands; each is ``command`` of the module of its name."""


class _Commands(TyperGroup):
    """A group that imports a subcommand's module on first use, because planning and probing need no
    torch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: dict[str, Any] = dict.fromkeys(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands and self.commands[cmd_name] is None:
            alone = typer.Typer(add_completion=False)
            alone.command(cmd_name)(_imported(cmd_name).command)
            self.commands[cmd_name] = _with_plain_help(typer.main.get_command(alone))
        return self.commands.get(cmd_name)

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _printable_usage():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _printable_usage():
            return super().invoke(ctx)


def _imported(command: str) -> Any:
    """Return a subcommand's module. Its imports are exempt from garbage collection: to search them,
    now and as the process ends, takes longer than most commands (0.5 s for torch's objects)."""
    looks = gc.isenabled()
    gc.disable()
    try:
        return import_module(f"mkernel.cli.{command}")
    finally:
        gc.freeze()
        if looks:
            gc.enable()


def _with_plain_help(command: Any) -> Any:
    """Escape the help of options: brackets in it are defaults, not markup, which typer would not
    show."""
    for parameter in command.params:
        if getattr(parameter, "help", None):
            parameter.help = escape(parameter.help)
    return command


_UsageError: Any = typer.BadParameter.__base__


@contextmanager
def _printable_usage() -> Iterator[None]:
    """Make typer's messages printable, because they quote arguments."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # its message is the help page
            missing = getattr(getattr(error, "param", None), "name", None)
            if missing == "op" and not error.message:
                error.message = f"Name one of: {ops.named()}."
            error.message = printable(error.message, 400)
        raise


app = typer.Typer(
    name="mkernel",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mkernel {__version__}")
        raise typer.Exit


def _print_include_dir(wanted: bool) -> None:
    if wanted:
        typer.echo(headers.include_dir())
        raise typer.Exit


@app.callback()
def _mkernel(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    include_dir: Annotated[
        bool,
        typer.Option(
            "--include-dir",
            callback=_print_include_dir,
            is_eager=True,
            help="Print the folder of the headers for native code of backends and exit.",
        ),
    ] = False,
) -> None:
    """Fused communication+compute kernels across accelerators and NICs."""


_REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or raise the quota",
    errno.EFBIG: "raise the limit of files (`ulimit -f`)",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "end other programs: the whole system has too many files open",
    errno.EAGAIN: "raise the limit of processes (`ulimit -u`)",
    errno.ENOMEM: "end other programs, or raise the limits of memory",
}
"""The advice for a user about an error of the system."""


def main() -> None:
    """Run the command line; turn errors into one line on stderr and an exit code."""
    take_over_streams()
    stderr = Terminal(stderr=True)
    stderr.soft_wrap = not stderr.is_terminal  # a log's line is one line

    def ended(code: int, text: str) -> None:
        with suppress(OSError):  # the terminal may be gone
            stderr.print(text, style="red" if code in (1, 2) else None)
        sys.exit(code)

    try:
        with _stopped_by_signals():
            try:
                app()
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
    except KeyboardInterrupt:
        ended(128 + signal.SIGINT, "interrupted")
    except _Stopped as stopped:
        ended(128 + stopped.number, f"stopped by {stopped.number.name}")
    except MkernelError as error:
        ended(1 if isinstance(error, WorldError) else 2, f"{type(error).__name__}: {error}")
    except OSError as error:
        if isinstance(error, LostOutput) and error.errno == errno.EPIPE:
            sys.exit(1)  # `mkernel ... | head` has read enough
        ended(1, _refused(error))


def _refused(error: OSError) -> str:
    """Return the error of the system and the remedy, as one line."""
    text = error.strerror or str(error)
    if error.filename is not None:
        text += f": {error.filename}"
    remedy = _REMEDIES.get(error.errno or 0)
    named = "ulimit" in text  # by whoever raised it
    return printable(f"OSError: {text}" + (f"; {remedy}" if remedy and not named else ""))


class _Stopped(SystemExit):
    """A signal that ends the process, as an exception, so that everything that was begun is cleaned
    up."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(128 + number)
        self.number = number


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise the first SIGTERM or SIGHUP that the process does not ignore. Later ones do not disturb
    the cleanup."""

    def stop(number: int, _frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        before.clear()
        raise _Stopped(signal.Signals(number))

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.getsignal(each) for each in numbers}
    before = {each: known for each, known in before.items() if known is signal.SIG_DFL}
    for each in before:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each, known in before.items():
            signal.signal(each, known)
