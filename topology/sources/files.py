"""Reading small text files of a real or recorded system tree, and files that a user names."""

from __future__ import annotations

from pathlib import Path

from mkernel.errors import InputFileError

_MOST = 65536
"""No attribute of sysfs is longer; a recorded tree from elsewhere may hold anything."""


def read_text(path: Path) -> str | None:
    """The file's text, stripped; None where it is missing, unreadable or empty."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST).decode("utf-8", errors="replace").strip("\0 \t\r\n") or None
    except (OSError, ValueError):
        return None


def read_bytes(path: Path, most: int) -> bytes:
    """The whole of a topology file. InputFileError: it cannot be read, or is longer than ``most``."""
    try:
        with path.open("rb") as file:
            text = file.read(most + 1)
    except OSError as error:
        raise InputFileError(f"topology file {path}: {error.strerror or error}") from error
    if len(text) > most:
        raise InputFileError(f"topology file {path} is larger than {most >> 20} MiB")
    return text


def read_int(path: Path) -> int | None:
    """The file's number, decimal or ``0x`` hexadecimal; None where it is missing or is not one."""
    text = read_text(path)
    if text is None:
        return None
    try:
        return int(text, 0)
    except ValueError:
        return None


def children(path: Path) -> list[Path]:
    """Entries of a folder, sorted by name; empty where it cannot be listed."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def resolve(link: Path, root: Path) -> Path | None:
    """Where a link of a tree leads, kept inside ``root``: an absolute target is one of the tree.

    None where it leads nowhere or out of the tree.
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
