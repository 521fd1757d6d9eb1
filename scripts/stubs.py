#!/usr/bin/env python3
"""Writes the types of the native modules beside them (`_nics.pyi`), as their bindings state them.

mypy and editors read them. Of a module that was not built here (no CUDA toolkit), nothing is known.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
from pathlib import Path

from pybind11_stubgen import main as stubgen

ROOT = Path(__file__).resolve().parents[1]
NOT_BUILT = "from typing import Any\n\ndef __getattr__(name: str) -> Any: ...\n"


def main() -> None:
    """Every module that a CMakeLists.txt below `backends` or `topology` makes."""
    logging.disable(logging.ERROR)  # about defaults that have no literal
    folders = (ROOT / name for name in ("backends", "topology"))
    for listed in sorted(file for each in folders for file in each.rglob("CMakeLists.txt")):
        for name in re.findall(r"pybind11_add_module\((\w+)", listed.read_text()):
            folder = listed.parent.relative_to(ROOT)
            module = ".".join(("mkernel", *folder.parts, name))
            try:
                importlib.import_module(module)
            except ImportError:
                (ROOT / folder / f"{name}.pyi").write_text(NOT_BUILT)
            else:
                stubgen([module, "--output-dir", str(ROOT)])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
