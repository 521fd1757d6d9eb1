"""Entry points of the packages that are installed.

Python looks through the files of all packages, which takes 10 ms where there are a hundred, and a rank
asks up to ten times as it joins a world. So they are kept for as long as the folders of Python's path
that have packages stay as they are. A rank also has what the process that it is forked from has found
(``before_fork``).
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

_State = tuple[str, int, int, int, int]


def points(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group, of the packages that are installed now."""
    states = map(_state, dict.fromkeys(sys.path))
    return _of_group(group, tuple(state for state in states if _has_packages(state)))


def _state(folder: str) -> _State:
    """What changes as a package is installed into a folder, or removed."""
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
    except OSError:  # an archive, or one whose names are not told: Python may know more
        return True
    return any(name.lower().endswith((".dist-info", ".egg-info", ".egg")) for name in names)


@lru_cache(maxsize=16)
def _of_group(group: str, _: tuple[_State, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))
