#!/usr/bin/env python3
"""The RC tests on the kernel's own software RDMA device (rxe), in virtual machines without KVM.

Boots Debian's kernel twice under QEMU's emulation, with this machine's root mounted read-only, makes
rxe0 in each (`tests/rxe/init`) and runs, with this project's environment and the system's libibverbs,
`tests/rxe/job`. Needs no RDMA hardware, and no right beyond that to install packages the first time.

Exit code 0 only where both guests said that their jobs passed. Results (JUnit) lie in
build/rxe/results.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from rxe_vm.guests import boot
from rxe_vm.image import initramfs
from rxe_vm.packages import CannotRun, fetch, install

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "rxe"
RESULTS = CACHE / "results"


def main() -> int:
    """Fetch, boot, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="with mkernel installed")
    parser.add_argument("--native", type=Path, default=ROOT / "build/native", help="CMake's folder")
    parser.add_argument("--limit", type=float, default=900, help="seconds for the guests")
    parser.add_argument("--job", default="sh tests/rxe/job", help="what each guest runs")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through boot, which ends the guests
    start = time.monotonic()
    install()
    kernel, busybox, pyverbs = fetch(CACHE)
    modules = pyverbs / "usr/lib/python3/dist-packages"
    variables = {
        "VENV": str(chosen.venv.absolute()),
        "NATIVE": str(chosen.native.absolute()),
        "RESULTS": "/run/results",
        "TMPDIR": "/run/tmp",
        "HOME": "/run",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYVERBS": str(modules),
        "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{modules}",
    }
    exports = "".join(f"export {k}={shlex.quote(v)}\n" for k, v in variables.items())
    with tempfile.TemporaryDirectory() as scratch:
        image = Path(scratch) / "initramfs"
        job = f"{exports}cd {shlex.quote(str(ROOT))} && {chosen.job}"
        image.write_bytes(initramfs(kernel, busybox, ROOT / "tests/rxe/init", job))
        results = Path(scratch) / "results"
        results.mkdir()
        try:
            passed = boot(kernel, image, results, chosen.limit)
        finally:
            shutil.rmtree(RESULTS, ignore_errors=True)
            shutil.copytree(results, RESULTS)
    print(f"rxe: {'passed' if passed else 'FAILED'} in {time.monotonic() - start:.0f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CannotRun as reason:
        print(f"rxe: {reason}", file=sys.stderr)
        sys.exit(2)
