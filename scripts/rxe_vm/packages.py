"""What the guests are made of, from Debian's packages: an emulator, a kernel, busybox, pyverbs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

KERNEL = "linux-image-amd64"  # the cloud kernel has no rxe
BUSYBOX = "busybox-static"
PYVERBS = "python3-pyverbs"  # unpacked, not installed: it would bring another Python
INSTALLED = {
    "qemu-system-x86": "qemu-system-x86_64",
    "iproute2": "rdma",
    "ibverbs-providers": "/etc/libibverbs.d/rxe.driver",
    "librdmacm1": "/usr/share/doc/librdmacm1",  # pyverbs loads it
}


class CannotRun(Exception):
    """Why the guests could not be made; the message says what to do."""


def run(*command: str, cwd: Path | None = None, timeout_s: float = 600) -> str:
    """A command's output; CannotRun with its last words where it fails."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotRun(f"{shlex.join(command)}: {error}") from error
    if done.returncode:
        raise CannotRun(f"{shlex.join(command)}: {done.stderr.strip()[-500:]}")
    return done.stdout


def install() -> None:
    """The packages that must be installed here: the emulator, and what guests use of our root."""
    missing = [
        package
        for package, file in INSTALLED.items()
        if not (Path(file).exists() if "/" in file else shutil.which(file))
    ]
    if not missing:
        return
    if os.geteuid() or not shutil.which("apt-get"):
        raise CannotRun(f"missing: {' '.join(missing)}; apt-get install {' '.join(missing)}")
    print("installing", *missing, flush=True)
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    run("apt-get", "update", "-qq")
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)


def newest_kernel() -> str:
    """The package that holds the newest kernel, by what the package without a version asks for."""
    asked = run("apt-cache", "depends", KERNEL)
    found = re.search(r"Depends: (linux-image-\S+)", asked)
    if found is None:
        raise CannotRun(f"apt knows no {KERNEL}; run apt-get update")
    return found[1]


def fetch(cache: Path) -> tuple[Path, Path, Path]:
    """Folders in ``cache`` with the unpacked kernel, busybox and pyverbs, downloaded where they are
    not there yet."""
    unpacked = cache / "kernel", cache / "busybox", cache / "pyverbs"
    missing = [folder for folder in unpacked if not folder.is_dir()]
    if not missing:
        return unpacked
    if not shutil.which("apt-get"):
        raise CannotRun("no apt-get here: the guests' kernel comes from Debian's packages")
    print("fetching, once:", *(folder.name for folder in missing), flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    try:
        kernel = newest_kernel()
    except CannotRun:
        run("apt-get", "update", "-qq")
        kernel = newest_kernel()
    for package, folder in zip((kernel, BUSYBOX, PYVERBS), unpacked, strict=True):
        if folder not in missing:
            continue
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            here = Path(scratch)
            run("apt-get", "download", "-qq", package, cwd=here)
            (archive,) = here.glob("*.deb")
            run("dpkg-deb", "-x", str(archive), str(here / "files"))
            (here / "files").rename(folder)  # whole or not at all
    return unpacked
