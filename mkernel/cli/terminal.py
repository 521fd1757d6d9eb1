"""Where text becomes output: names from files, drivers and arguments are shown, never obeyed."""

from __future__ import annotations

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

from mkernel.errors import ArgumentError, Unsupported
from mkernel.printable import printable

_BLANKS = re.compile(r"[ \t]+$", re.MULTILINE)
_UNLIMITED = 4096
"""Characters of a line in a pipe: other programs read it, and wrap it if they want to."""


class Terminal(Console):
    """A console without markup, on which control characters in text become escapes.

    Colours, cursor movements and line breaks that rich makes itself pass. In a pipe lines are as long
    as what they say, unless COLUMNS is set, and do not end in blanks.
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
    """Tells what is done, of so many, on a line that changes, or in a pipe on lines of stderr."""
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
    """Plain text on stdout, as it is but for control characters, with one line break at its end."""
    sys.stdout.write(_lines(text.rstrip("\n")) + "\n")


def draw(option: str, file: Path, formats: str, write_picture: Callable[[], None]) -> None:
    """Writes a picture that an option asks for.

    Raises:
        Unsupported: matplotlib is missing. ArgumentError: the file cannot be written.
    """
    try:
        write_picture()
    except ImportError as error:
        raise Unsupported(f"{option} needs matplotlib: pip install matplotlib ({error})") from error
    except (OSError, ValueError) as error:
        raise unwritable(option, file, error, formats) from error


def unwritable(option: str, file: Path, error: Exception, formats: str = "") -> ArgumentError:
    """The file that an option names cannot be written."""
    why = (isinstance(error, OSError) and error.strerror) or str(error)
    return ArgumentError(option, file, f"a file that can be written{formats}", why=why)


def _lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))
