"""The pages of the documentation, and the blocks of text in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    *SITE,
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
    ),
]

_BLOCK = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: its language, its title if it has one, its text."""

    language: str
    title: str | None
    text: str


def name(page: Path) -> str:
    """Its path from the root."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """In the order of the page."""
    found = []
    for _, language, rest, text in _BLOCK.findall(page.read_text()):
        title = re.fullmatch(r' title="(.+)"', rest)
        found.append(Block(language, title and title[1], text))
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _BLOCK.sub("", page.read_text())
