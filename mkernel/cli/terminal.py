"""Output of text to terminals and pipes: names from files, drivers and arguments are shown, never
interpreted."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from mkernel.errors import ArgumentError, MkernelError, Unsupported
from mkernel.printable import printable

_BLANKS = re.compile(r"[ \t]+$", re.MULTILINE)
_UNLIMITED = 4096
"""The characters of a line in a pipe: other programs read it, and wrap it if they want to."""
_SIMPLER = {"·": "-", "→": "->", "…": "...", "—": "-"}
"""Replacements of our own characters in an encoding that lacks them."""
_SIMPLIFY = "mkernel.simplify"
MATPLOTLIB = "pip install matplotlib"
"""The command that installs the library that draws."""


class Terminal(Console):
    """A console without markup, on which control characters in text become escapes.

    Colours, cursor movements and line breaks that rich makes itself pass. In a pipe lines are as
    long as their text, unless COLUMNS is set, and do not end in blanks.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})
        if not self.is_terminal and "width" not in options and "COLUMNS" not in os.environ:
            self.width = _UNLIMITED

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        text = super()._render_buffer(buffer)
        return text if self.is_terminal else _BLANKS.sub("", text)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(_lines(text), **options)  # before columns are as wide as it

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(_lines(segment.text), segment.style)


@contextmanager
def progress(console: Console, waiting: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show how many of ``total`` are done, on a line that changes, or in a pipe on lines of stderr.
    Yields the function that reports one as done."""
    count = 0

    def told(done: str) -> str:
        nonlocal count
        count += 1
        return f"{count} of {total} done: {done}"

    if console.is_terminal:
        with console.status(waiting) as status:
            yield lambda done: status.update(told(done))
    else:
        errors = Terminal(stderr=True)
        yield lambda done: errors.print(told(done))


def write(text: str) -> None:
    """Write plain text to stdout, unchanged except for control characters, with one line break at
    its end."""
    print(_lines(text.rstrip("\n")))


def write_json(text: str) -> None:
    """Write JSON to stdout. Characters that the encoding lacks become escapes."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = re.sub("[^\0-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)
    print(text)


def _simplified(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that the encoding lacks, as a handler of ``codecs``."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_SIMPLER.get(one) or _escaped(one) for one in missing), error.end


def _escaped(character: str) -> str:
    is_spinner = "\u2800" <= character <= "\u28ff"  # rich's, in braille
    return "*" if is_spinner else character.encode("ascii", "backslashreplace").decode()


codecs.register_error(_SIMPLIFY, _simplified)


class LostOutput(OSError):
    """The error that stdout or stderr takes no more text."""


class _Output(io.TextIOWrapper):
    """A standard stream that takes every character, and is named in errors if it cannot be written."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        buffer, encoding = stream.buffer, stream.encoding
        super().__init__(buffer, encoding, errors=_SIMPLIFY, line_buffering=stream.line_buffering)

    def write(self, text: str, /) -> int:
        with self._named():
            return super().write(text)

    def flush(self) -> None:
        with self._named():
            super().flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            which = "stdout" if self is sys.stdout else "stderr"
            # Python writes what is left as it ends, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            raise LostOutput(
                error.errno, f"{which} cannot be written: {os.strerror(error.errno or 0)}"
            ) from error


def take_over_streams() -> None:
    """Let stdout and stderr take all characters, and raise :class:`LostOutput`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            setattr(sys, name, _Output(stream))


@contextmanager
def writing(option: str, file: Path, formats: str = "") -> Iterator[None]:
    """Name the option and the file in errors of a block that writes the file.

    Raises:
        Unsupported: the file is a picture, and matplotlib is missing. ArgumentError: the file cannot be
            written.
    """
    try:
        yield
    except ImportError as error:
        raise Unsupported(f"{option} needs matplotlib: {MATPLOTLIB} ({error})") from error
    except (OSError, ValueError) as error:
        if isinstance(error, MkernelError):
            raise
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        legal = f"a file that can be written{formats}"
        raise ArgumentError(option, file, legal, why=why) from error


def _lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))
