"""Support of a source tree without native modules, such as a clone in which ``pip install .`` has
run.

A program in the tree imports from the tree first. It runs all the same: the modules come from the
installed package, provided that it was made from the same files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, MutableSequence
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from mkernel.errors import NotBuilt

DISTRIBUTION = "mkernel-fused"
_BROUGHT_ALONG = (".py", ".json")
"""Endings of the files that a wheel takes unchanged from the tree, and that programs read."""


def import_installed(package: MutableMapping[str, Any]) -> None:
    """Make `package`, the globals of ``mkernel``, import its modules from the installed package.

    Raises:
        NotBuilt: nothing is installed for this Python, or it was made from other files.
    """
    tree = Path(package["__file__"]).parent
    folder = _installed()
    if folder is None:
        raise NotBuilt(tree.parent, sys.executable)
    if (differs := _first_difference(tree, folder)) is not None:
        raise NotBuilt(tree.parent, sys.executable, folder.parent, differs)
    path: MutableSequence[str] = package["__path__"]
    path[:] = [str(folder)]
    package["__file__"] = str(folder / "__init__.py")
    for name in [name for name in sys.modules if name.startswith("mkernel.backends")]:
        del sys.modules[name]  # imported from the tree, in search of native modules
    package.pop("backends", None)


def _installed() -> Path | None:
    """Find the folder of an installed package that has native modules; None: there is none."""
    for found in distributions(name=DISTRIBUTION):
        folder = Path(str(found.locate_file("mkernel")))
        native = folder / "backends" / "transport" / "_transport"
        if any(Path(f"{native}{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
            return folder
    return None


def _first_difference(tree: Path, installed: Path) -> str | None:
    """Return the first file, by name, that differs between both folders; None: there is none."""
    mine, theirs = _files(tree), _files(installed)
    for name in sorted(mine.keys() | theirs.keys()):
        if name not in mine or name not in theirs:
            return name
        if mine[name].read_bytes() != theirs[name].read_bytes():
            return name
    return None


def _files(package: Path) -> dict[str, Path]:
    """Map names inside a package to the files that a wheel takes along; folders may be links."""
    return {
        os.path.relpath(os.path.join(folder, name), package): Path(folder, name)
        for folder, _, names in os.walk(package, followlinks=True)
        for name in names
        if name.endswith(_BROUGHT_ALONG)
    }
