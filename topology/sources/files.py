"""Reading of small text files of a real or recorded system tree."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from mkernel.errors import InputFileError
from mkernel.user_files import open_file

_MOST = 65536
"""The most bytes of an attribute of sysfs, and entries of a folder of it; a recorded tree from
elsewhere may hold anything."""


def read_text(path: Path) -> str | None:
    """Return the file's text, stripped; None if it is missing, unreadable or empty."""
    try:
        with open_file(path, "file") as file:
            return file.read(_MOST).decode("utf-8", errors="replace").strip("\0 \t\r\n") or None
    except (OSError, InputFileError):
        return None


def read_int(path: Path) -> int | None:
    """Return the file's number, decimal or ``0x`` hexadecimal; None if it is missing or is no
    number."""
    text = read_text(path)
    if text is None:
        return None
    try:
        return int(text, 0)
    except ValueError:
        return None


def children(path: Path) -> list[Path]:
    """List the entries of a folder, sorted by name; empty if it cannot be listed."""
    try:
        return sorted(islice(path.iterdir(), _MOST))
    except OSError:
        return []


def resolve(link: Path, root: Path) -> Path | None:
    """Return the target of a link of a tree, kept inside ``root``: an absolute target is taken as
    one of the tree.

    None if it leads nowhere or out of the tree.
    """
    base = root.resolve()
    try:
        if link.is_symlink():
            target = link.readlink()
            if target.is_absolute():
                link = base / target.relative_to("/")
        real = link.resolve()
    except (OSError, RuntimeError, ValueError):
        return None
    return real if real.exists() and real.is_relative_to(base) else None
