"""Tables, times and amounts for people: whole words in any width, units that fit."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_PROSE_WIDTH = 28
"""The least width of a column of running text, in characters."""
_BETWEEN = "  ·  "
_BLANKS = 3
"""The characters around a column and between it and the next one."""

Cell = str | Text


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading and its format.

    ``right``: numbers, which end below one another. ``prose``: running text, which is wrapped between
    words; other cells stay on one line. ``key``: names its row if the row is a paragraph. ``unit``:
    unit of its numbers, shown with the heading, and in paragraphs after each number.
    """

    name: str
    right: bool = False
    prose: bool = False
    key: bool = False
    unit: str = ""

    @property
    def heading(self) -> str:
        """The text above the cells."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    def said(self, cell: Text) -> Text:
        """Return a cell as running text."""
        number = self.unit and cell.plain.replace(".", "", 1).isdecimal()
        return Text.assemble((f"{self.name} ", "dim"), cell, f" {self.unit}" if number else "")


class Sheet:
    """A table: rows below headings if the terminal is wide enough for all columns; otherwise each
    row is a paragraph, in which every value follows its heading. No column is lost, and no word is
    cut."""

    def __init__(self, columns: Iterable[Column], title: Cell = "") -> None:
        self._columns = tuple(columns)
        self._title = Text(title, style="bold") if isinstance(title, str) else title
        self._rows: list[tuple[Text, ...]] = []

    def row(self, *cells: Cell) -> None:
        """Add a row: a cell for each column."""
        if len(cells) != len(self._columns):
            raise ValueError(f"{len(cells)} cells for {len(self._columns)} columns")
        self._rows.append(tuple(Text(one) if isinstance(one, str) else one for one in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._title:
            yield self._title
        told = [
            number
            for number in range(len(self._columns))
            if any(cells[number].plain for cells in self._rows)
        ]
        columns = [self._columns[number] for number in told]
        rows = [[cells[number] for number in told] for cells in self._rows]
        under = [[cells[place] for cells in rows] for place in range(len(columns))]
        least = list(map(_least, columns, under))
        room = options.max_width - _BLANKS * len(columns) + 1
        if sum(least) <= room:
            yield _table(columns, rows, _fitted(least, list(map(_most, columns, under)), room))
            return
        for cells in rows:
            yield from _paragraph(list(zip(columns, cells, strict=True)), options.max_width)


def _least(column: Column, cells: Sequence[Text]) -> int:
    """Return the width below which a word, or a cell of one line, would be cut."""
    widths = [*map(cell_len, column.heading.split())]
    if column.prose:
        longest = max((cell.cell_len for cell in cells), default=0)
        widths.append(min(longest, _PROSE_WIDTH))
        widths += (cell_len(word) for cell in cells for word in cell.plain.split())
    else:
        widths += (cell_len(line) for cell in cells for line in cell.plain.splitlines())
    return max(widths, default=0)


def _most(column: Column, cells: Sequence[Text]) -> int:
    """Return the width at which nothing is wrapped."""
    lines = (line for cell in cells for line in cell.plain.splitlines())
    return max(map(cell_len, (column.heading, *lines)), default=0)


def _fitted(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Return a width for each column, together at most ``room``: the columns that lack little to be
    on one line get more than their least first. Otherwise rich would crop the table."""
    widths, spare = list(least), room - sum(least)
    for place in sorted(range(len(least)), key=lambda place: most[place] - least[place]):
        more = min(most[place] - least[place], spare)
        widths[place] += more
        spare -= more
    return widths


def _table(
    columns: Sequence[Column], rows: Sequence[Sequence[Text]], widths: Sequence[int]
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for column, width in zip(columns, widths, strict=True):
        side: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(Text(column.heading), justify=side, width=width)
    for cells in rows:
        table.add_row(*cells)
    return table


def _paragraph(named: Sequence[tuple[Column, Text]], width: int) -> RenderResult:
    head = Text("  ").join(cell for column, cell in named if column.key and cell.plain)
    if head.plain:
        head.stylize("bold")
        yield head
    line = Text()
    for column, cell in named:
        if column.key or column.prose or not cell.plain:
            continue
        pair = column.said(cell)
        if line.plain and len(line) + len(_BETWEEN) + len(pair) > width - 2:
            yield Padding(line, (0, 0, 0, 2))
            line = Text()
        line = Text(_BETWEEN).join([line, pair]) if line.plain else pair
    if line.plain:
        yield Padding(line, (0, 0, 0, 2))
    for column, cell in named:
        if column.prose and not column.key and cell.plain:
            yield Padding(cell, (0, 0, 0, 2))


Unit = Literal["us", "ms", "s"]
_US: dict[Unit, float] = {"us": 1.0, "ms": 1e3, "s": 1e6}


def unit_of(times_us: Iterable[float]) -> Unit:
    """Return the unit in which most of these times, in microseconds, have few digits before the
    point."""
    known = [time for time in times_us if time > 0]
    middle = statistics.median(known) if known else 0.0
    return "us" if middle < 1e3 else "ms" if middle < 1e6 else "s"


def in_unit(time_us: float, unit: Unit) -> str:
    """Return a time in microseconds as a number of units, with three digits or more: ``0.042``,
    ``3.14``."""
    return _digits(time_us / _US[unit])


def duration(time_us: float) -> str:
    """Return a time in microseconds with the unit that fits: ``690 us``, ``172 ms``, ``1.50 s``."""
    unit = unit_of([time_us])
    return f"{in_unit(time_us, unit)} {unit}"


def amount(nbytes: float) -> str:
    """Return bytes with the unit that fits, in powers of 1000: ``0 B``, ``96.0 kB``, ``151 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{_digits(nbytes)} {unit}"
        nbytes /= 1000
    return f"{_digits(nbytes)} TB"


def _digits(value: float) -> str:
    size = abs(value)
    return (
        f"{value:.{0 if size >= 100 or size == 0 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"
    )
