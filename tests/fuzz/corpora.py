"""The fuzzer's corpora: a JSON file for each target, which maps an input's name to the input.

Inputs are bytes. They are stored as UTF-8 text; a lone surrogate stands for a byte that is not UTF-8.
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent / "corpora"


def read(target: str) -> dict[str, bytes]:
    """Return a target's inputs by name."""
    stored: dict[str, str] = json.loads((FOLDER / f"{target}.json").read_text())
    return {name: text.encode("utf-8", "surrogateescape") for name, text in stored.items()}


def write(target: str, inputs: dict[str, bytes]) -> None:
    """Replace a target's inputs. Each has a line of its own, by name."""
    stored = {name: inputs[name].decode("utf-8", "surrogateescape") for name in sorted(inputs)}
    (FOLDER / f"{target}.json").write_text(json.dumps(stored, indent=0) + "\n")


def unpack(target: str, folder: Path) -> list[Path]:
    """Write a target's inputs to ``folder``, a file each; return the files in the corpus's order."""
    folder.mkdir()
    files = []
    for name, data in read(target).items():
        files.append(folder / name)
        files[-1].write_bytes(data)
    return files
