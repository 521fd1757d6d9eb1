"""Detection of Ascend's own software on a machine. Files are only looked for; nothing is imported
or run.

Places are those of the vendor's installers: ``ASCEND_HOME_PATH`` (or the older
``ASCEND_TOOLKIT_HOME``) as ``set_env.sh`` sets it, else ``/usr/local/Ascend``; device nodes
``/dev/davinci<n>``. They come from public documentation and were not tried on a machine with an
NPU.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from importlib import metadata
from pathlib import Path

from mkernel.backends.contracts.status import Status
from mkernel.topology.sources.files import read_text

_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_ROOT = "usr/local/Ascend"
_TOOLKITS = (f"{_ROOT}/cann", f"{_ROOT}/ascend-toolkit/latest")
_INSTALLED = f"{platform.machine()}-linux/ascend_toolkit_install.info"
_VERSION = re.compile(r"^version\s*=\s*v?(\d[\w.-]*)", re.MULTILINE | re.IGNORECASE)
_COMPILERS = ("bisheng", "ccec")
_DEVICE = re.compile(r"davinci\d+")
_USE = "install {}, as docs/ascend.md says, to use an NPU"


def software(root: Path) -> tuple[tuple[str, Status], ...]:
    """Report CANN, torch_npu, and npu-smi with driver and devices. ``root``: the folder that holds
    /usr and /dev."""
    return (("CANN", _cann(root)), ("torch_npu", _torch_npu()), ("npu-smi", _driver(root)))


def _cann(root: Path) -> Status:
    homes = [Path(os.environ[name]) for name in _HOMES if os.environ.get(name)]
    for home in [*homes, *(root / each for each in _TOOLKITS)]:
        if not home.is_dir():
            continue
        version = _version(home / _INSTALLED) or "of unknown version"
        compiler = next(filter(None, (_tool(name, home) for name in _COMPILERS)), "no compiler")
        return Status(True, f"{version} in {home}; {compiler}", "")
    return Status(False, "not found; NPUs are simulated", _USE.format("CANN"))


def _torch_npu() -> Status:
    try:
        version = metadata.version("torch_npu")
    except metadata.PackageNotFoundError:
        return Status(False, "not installed", _USE.format("torch_npu"))
    return Status(True, f"{version} (not imported here)", "")


def _driver(root: Path) -> Status:
    tool = _tool("npu-smi", root / "usr/local")
    driver = _version(root / _ROOT / "driver/version.info")
    folder = root / "dev"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    devices = sum(_DEVICE.fullmatch(name) is not None for name in names)
    seen = [
        str(tool) if tool else "npu-smi not found",
        f"driver {driver}" if driver else "no driver",
        f"{devices} devices (/dev/davinci*)" if devices else "no /dev/davinci*",
    ]
    complete = bool(tool and driver and devices)
    remedy = "" if complete else _USE.format("the NPU driver")
    return Status(complete, "; ".join(seen), remedy)


def _tool(name: str, home: Path) -> str | None:
    folders = (home / "bin", home / "compiler/ccec_compiler/bin", home / "sbin")
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders)))


def _version(file: Path) -> str | None:
    match = _VERSION.search(read_text(file) or "")
    return match[1] if match else None
