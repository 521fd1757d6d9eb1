"""Files that a user names. They are read within limits, because one may be a pipe without a writer,
a device without an end, or hold anything; they are written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from mkernel.errors import InputFileError

_MOST_KEYS = 4096
"""The most keys of one JSON object: each key that a model does not know becomes an error of about 1
KB."""


def open_file(path: Path, what: str) -> BinaryIO:
    """Open the file to read. Never waits.

    Args:
        what: the words that name the file in messages, such as an option.

    Raises:
        InputFileError: it is missing, unreadable, or no regular file.
    """
    descriptor = -1
    try:
        mode = os.stat(path).st_mode  # before it is opened: that alone may act on a device
        if stat.S_ISREG(mode):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
            mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            advice = "" if stat.S_ISDIR(mode) else " (save what it gives to one)"
            raise InputFileError(
                f"{what} {path} is a {_kind(mode)}; expected a regular file{advice}"
            )
        file, descriptor = os.fdopen(descriptor, "rb"), -1
        return file
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        if isinstance(error, InputFileError):
            raise
        raise InputFileError(f"{what} {path}: {_reason(error)}") from error
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def read_file(path: Path, what: str, most: int) -> bytes:
    """Return the whole file. InputFileError, as :func:`open_file`, and if it is longer than
    ``most``."""
    with open_file(path, what) as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise InputFileError(f"{what} {path}: {_reason(error)}") from error
    if len(content) > most:
        raise InputFileError(f"{what} {path} is larger than {most / 2**20:g} MiB")
    return content


def parse_json(content: bytes | str) -> Any:
    """Parse JSON from outside as Python's objects. ValueError, RecursionError: it is none, or an
    object has more keys than any of ours."""
    return json.loads(content, object_pairs_hook=_object)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _MOST_KEYS:
        raise ValueError(f"an object of {len(pairs)} keys; expected at most {_MOST_KEYS}")
    return dict(pairs)


def _kind(mode: int) -> str:
    for kind, name in (
        (stat.S_ISDIR, "folder"),
        (stat.S_ISFIFO, "named pipe"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISCHR, "device"),
        (stat.S_ISBLK, "device"),
    ):
        if kind(mode):
            return name
    return "special file"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to, and finally replace ``path`` by the file written there.

    A write that fails leaves ``path`` as it was, and nothing beside it. A ``path`` that is no
    regular file (a device, a pipe), or lies in a folder that takes no other file, is written in
    place.

    Raises:
        OSError: ``path`` cannot be written.
    """
    place = Path(os.path.realpath(path))  # a link goes on to lead to the file
    if not _replaceable(place):
        yield path
        return
    draft = place.with_name(f".{os.getpid()}-{threading.get_ident()}{place.suffix}")
    try:
        yield draft
        with suppress(FileNotFoundError):
            draft.chmod(stat.S_IMODE(place.stat().st_mode))
        os.replace(draft, place)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def write_file(path: Path, text: str) -> None:
    """Write text to a file as UTF-8: all of it, or nothing. OSError, as :func:`whole_file`."""
    with whole_file(path) as draft:
        draft.write_text(text, encoding="utf-8")


def save_picture(figure: Any, path: Path) -> None:
    """Save a figure of matplotlib in the format of the file's suffix, or as PNG without one.

    Raises:
        OSError: as :func:`whole_file`. ValueError: there is no such format.
    """
    with whole_file(path) as draft:
        figure.savefig(draft, format=path.suffix[1:] or "png", dpi=120)


def _replaceable(place: Path) -> bool:
    """Return whether another file may replace this one. PermissionError: it is read-only."""
    if not os.path.lexists(place):
        return True
    if not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
    return place.is_file() and os.access(place.parent, os.W_OK) and not os.path.ismount(place)
