"""A copy of the tree, for tests and tools that run changed or otherwise built code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def copy_of_tree(to: Path, *, built: bool = True) -> None:
    """What git knows of the tree, in ``to``, which is emptied first; ``built``: and native modules."""
    shutil.rmtree(to, ignore_errors=True)
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    if built:
        folders = (ROOT / "backends", ROOT / "topology")
        names += [str(each.relative_to(ROOT)) for one in folders for each in one.rglob("*.so")]
    for name in filter(None, names):
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "mkernel", "backends", "topology", "tests"],
        cwd=to, check=False,
    )  # fmt: skip
