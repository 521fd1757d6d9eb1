"""Detection of the CUDA toolkit on a machine. Files are only looked for; nothing is run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mkernel.backends.contracts.status import Status


def nvcc(root: Path) -> str | None:
    """Return the path of the compiler that a build would find. ``root``: the folder that holds /usr."""
    home = os.environ.get("CUDA_HOME") or str(root / "usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def software(root: Path) -> tuple[tuple[str, Status], ...]:
    """Return the compiler's row for ``mkernel doctor``. ``root``: the folder that holds /usr, as in
    :func:`nvcc`."""
    found = nvcc(root)
    if found:
        return (("nvcc", Status(True, found)),)
    detail, remedy = (
        "not found; CUDA kernels are not built",
        "install the CUDA toolkit to build them",
    )
    return (("nvcc", Status(False, detail, remedy)),)
