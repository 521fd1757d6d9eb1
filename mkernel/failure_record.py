"""The last failure of a world on this host, kept for a bug report.

Each rank that learns why its world broke writes the same file, and the last one stays: the cause is
the same on all. The file is the user's own, in a folder that nobody else can write to.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkernel.user_files import parse_json, read_file, whole_file

_MOST_BYTES = 1 << 20
_MOST_DEEP = 32


def path() -> Path:
    """Return the record's path: ``mkernel-<uid>/last-failure.json`` in the folder for temporary
    files."""
    return Path(tempfile.gettempdir()) / f"mkernel-{os.getuid()}" / "last-failure.json"


def keep(record: Mapping[str, Any]) -> Path:
    """Replace the last record by a JSON-safe one. OSError: it cannot be kept."""
    file = path()
    with contextlib.suppress(FileExistsError):
        file.parent.mkdir(mode=0o700)
    _check_own(file.parent)
    with whole_file(file) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            json.dump(record, opened, indent=2, default=str)
    return file


def last() -> dict[str, Any] | None:
    """Return the record that was kept last; None: there is none.

    Raises:
        InputFileError, OSError, ValueError, RecursionError: there is one that cannot be read or
            shown.
    """
    file = path()
    if not os.path.lexists(file):
        return None
    _check_own(file.parent)
    found = parse_json(read_file(file, "the last failure,", _MOST_BYTES))
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no record")
    _check_depth(found)
    json.dumps(found, ensure_ascii=False).encode()  # ValueError for half of a character
    return found


def _check_depth(record: dict[str, Any]) -> None:
    level: list[Any] = [record]
    for _ in range(_MOST_DEEP):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [one for each in inner for one in each if isinstance(one, dict | list)]
    if level:
        raise ValueError(f"lists and objects lie in each other more than {_MOST_DEEP} deep")


def _check_own(folder: Path) -> None:
    """Raise PermissionError if another user could have put something into the folder."""
    found = os.lstat(folder)
    others = stat.S_IMODE(found.st_mode) & 0o022
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or others:
        raise PermissionError(f"{folder} is no folder that this user alone can write to")
