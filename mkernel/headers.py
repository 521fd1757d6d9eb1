"""The folder of the C++ headers that native code of other packages includes."""

from __future__ import annotations

from pathlib import Path


def include_dir() -> str:
    """Return the folder to pass to a compiler as ``-I``; ``docs/writing-a-backend.md`` names its
    headers.

    In a repository it is the root, whose headers are the same under the same names.
    """
    package = Path(__file__).parent
    installed = package / "include"
    return str(installed if installed.is_dir() else package.parent)
