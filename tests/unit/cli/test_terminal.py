"""What is printed is shown, never obeyed."""

from __future__ import annotations

import io

import pytest
from rich.table import Table
from rich.text import Text

from mkernel.cli.terminal import Terminal, write

EVIL = "e\x1b]0;owned\x07\x1b[2J\u202evil\x9b31m[/red]:smile:"
SHOWN = r"e\x1b]0;owned\x1b[2J\u202evil\x9b31m[/red]:smile:"  # rich drops the bell of styled text


def _printed(*what: object, **options: object) -> str:
    said = io.StringIO()
    Terminal(
        file=said, width=200, highlight=False, force_terminal=True, color_system="standard"
    ).print(*what, **options)
    return said.getvalue()


def _table() -> Table:
    table = Table("name")
    table.add_row(EVIL)
    return table


@pytest.mark.parametrize("what", [EVIL, Text(EVIL), _table()], ids=["text", "styled", "table"])
def test_control_characters_and_markup_are_shown(what: object) -> None:
    said = _printed(what)
    assert SHOWN in said.replace(r"\x07", "")
    assert not set("\x07\x9b\u202e") & set(said)
    assert "\x1b]" not in said
    assert "\x1b[2J" not in said


def test_styles_pass() -> None:
    assert _printed("red", style="red") == "\x1b[31mred\x1b[0m\n"


def test_plain_text_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    write(f"one\n{EVIL}\n\n")
    assert capsys.readouterr().out == "one\n" + SHOWN.replace("owned", r"owned\x07") + "\n"
