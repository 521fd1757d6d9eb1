"""Entry points of the installed packages.

Python looks through the files of all packages, which takes 10 ms if there are a hundred, and a rank
does so up to ten times as it joins a world. So the entry points are cached as long as the folders
of Python's path that have packages stay unchanged. A rank also inherits those that the process it
is forked from has found (``before_fork``).
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

_State = tuple[str, int, int, int, int]


def points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, of the packages that are installed now."""
    states = map(_state, dict.fromkeys(sys.path))
    return _of_group(group, tuple(state for state in states if _has_packages(state)))


def _state(folder: str) -> _State:
    """Return a value that changes when a package is installed into a folder, or removed."""
    try:
        found = os.stat(folder or ".")
    except OSError:
        return folder, 0, 0, 0, 0
    return folder, found.st_dev, found.st_ino, found.st_nlink, found.st_mtime_ns


@lru_cache(maxsize=256)
def _has_packages(state: _State) -> bool:
    try:
        names = os.listdir(state[0] or ".")
    except FileNotFoundError:
        return False
    except OSError:  # an archive, or a folder that cannot be listed: Python may know more
        return True
    return any(name.lower().endswith((".dist-info", ".egg-info", ".egg")) for name in names)


@lru_cache(maxsize=16)
def _of_group(group: str, _: tuple[_State, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))
