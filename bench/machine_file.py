"""Writes a section of a backend's data file (``machine.json``), one short object or list a line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_LEAF = re.compile(r"([\[{])\n\s+([^\[\]{}\n]+(?:\n[^\[\]{}\n]+)*?)\n\s+([\]}])")
_LONGEST = 100


def _joined(match: re.Match[str]) -> str:
    line = match[1] + re.sub(r"\n\s*", " ", match[2]) + match[3]
    return line if len(line) <= _LONGEST else match[0]


def text(tree: Any) -> str:
    """The JSON of a data file."""
    return _LEAF.sub(_joined, json.dumps(tree, indent=1)) + "\n"


def write_section(file: Path, name: str, section: Any) -> None:
    """Replace one section of a data file; the others stay as they are."""
    tree = json.loads(file.read_text())
    tree[name] = section
    file.write_text(text(tree))
