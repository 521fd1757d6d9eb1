#!/usr/bin/env python3
"""The RC tests on the kernel's own software RDMA device (rxe), in a virtual machine without KVM.

Boots Debian's kernel under QEMU's emulation with this machine's root mounted read-only, makes rxe0 in
there (`tests/rxe/init`) and runs, with this project's environment and the system's libibverbs,
`tests/rxe/job`. Needs no RDMA hardware, and no right beyond that to install packages the first time.

Exit code 0 only where the guest said that its job passed. Results (JUnit) lie in build/rxe/results.
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "rxe"
RESULTS = CACHE / "results"
KERNEL_PACKAGE = "linux-image-amd64"  # the cloud kernel has no rxe
BUSYBOX_PACKAGE = "busybox-static"
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "dummy", "crc32_generic", "ib_uverbs", "rdma_rxe")
INSTALLED = {
    "qemu-system-x86": "qemu-system-x86_64",
    "iproute2": "rdma",
    "ibverbs-providers": "/etc/libibverbs.d/rxe.driver",
}
EXIT = re.compile(r"rxe-guest: exit (\d+)")


class CannotRun(Exception):
    """Why the guest could not be made; the message says what to do."""


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
    """The packages that must be installed here: the emulator, and what the guest uses of our root."""
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


def kernel_package() -> str:
    """The package that holds the newest kernel, by what the package without a version asks for."""
    asked = run("apt-cache", "depends", KERNEL_PACKAGE)
    found = re.search(r"Depends: (linux-image-\S+)", asked)
    if found is None:
        raise CannotRun(f"apt knows no {KERNEL_PACKAGE}; run apt-get update")
    return found[1]


def fetch() -> tuple[Path, Path]:
    """Folders with the unpacked kernel and busybox, downloaded where they are not there yet."""
    unpacked = CACHE / "kernel", CACHE / "busybox"
    if all(folder.is_dir() for folder in unpacked):
        return unpacked
    print("fetching a kernel (70 MB, once)", flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        packages = kernel_package(), BUSYBOX_PACKAGE
    except CannotRun:
        run("apt-get", "update", "-qq")
        packages = kernel_package(), BUSYBOX_PACKAGE
    for package, folder in zip(packages, unpacked, strict=True):
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            here = Path(scratch)
            run("apt-get", "download", "-qq", package, cwd=here)
            (archive,) = here.glob("*.deb")
            run("dpkg-deb", "-x", str(archive), str(here / "files"))
            shutil.rmtree(folder, ignore_errors=True)
            (here / "files").rename(folder)  # whole or not at all
    return unpacked


def in_order(files: dict[str, Path], wanted: tuple[str, ...]) -> list[Path]:
    """Modules with all that they depend on, each after what it needs."""
    ordered: dict[str, Path] = {}

    def add(name: str) -> None:
        if name in ordered:
            return
        if name not in files:
            raise CannotRun(f"the kernel has no module {name}; remove {CACHE} and try again")
        said = re.search(rb"\0depends=([^\0]*)\0", files[name].read_bytes())
        for dependency in (said[1].decode() if said else "").split(","):
            if dependency:
                add(dependency.replace("-", "_"))
        ordered[name] = files[name]

    for name in wanted:
        add(name)
    return list(ordered.values())


def archive(entries: Iterator[tuple[str, int, bytes, tuple[int, int]]]) -> bytes:
    """An initramfs (cpio, "newc") of (name, mode, content, device number) entries."""
    out = bytearray()
    for inode, (name, mode, content, device) in enumerate(entries, 1):
        path = name.encode() + b"\0"
        fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(path), 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + path
        out += bytes(-len(out) % 4)
        out += content
        out += bytes(-len(out) % 4)
    return bytes(out)


def initramfs(kernel: Path, busybox: Path, job: str) -> bytes:
    """What the guest starts from: busybox, modules, `init` and its job."""
    files = {file.stem.replace("-", "_"): file for file in (kernel / "lib/modules").rglob("*.ko")}
    modules = in_order(files, MODULES)

    def entries() -> Iterator[tuple[str, int, bytes, tuple[int, int]]]:
        none = (0, 0)
        for folder in ("bin", "dev", "modules"):
            yield folder, stat.S_IFDIR | 0o755, b"", none
        # The first process's standard streams, before /dev is mounted.
        yield "dev/console", stat.S_IFCHR | 0o600, b"", (5, 1)
        yield "init", stat.S_IFREG | 0o755, (ROOT / "tests/rxe/init").read_bytes(), none
        yield "job", stat.S_IFREG | 0o644, job.encode(), none
        yield "bin/busybox", stat.S_IFREG | 0o755, (busybox / "bin/busybox").read_bytes(), none
        for module in modules:
            yield f"modules/{module.name}", stat.S_IFREG | 0o644, module.read_bytes(), none
        order = "\n".join(module.name for module in modules)
        yield "modules/order", stat.S_IFREG | 0o644, order.encode(), none
        yield "TRAILER!!!", 0, b"", none

    return archive(entries())


def boot(kernel: Path, image: Path, results: Path, limit_s: float) -> int:
    """Run the guest to its end, its console on ours; its job's exit code.

    ``results``: the one folder that it may write to.
    """
    (vmlinuz,) = (kernel / "boot").glob("vmlinuz-*")
    share = "security_model=none,multidevs=remap"
    command = [
        *("qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max"),
        *("-smp", str(min(4, os.cpu_count() or 1)), "-m", "2048"),
        *("-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"),
        *("-fsdev", f"local,id=root,path=/,readonly=on,{share}"),
        *("-device", "virtio-9p-pci,fsdev=root,mount_tag=root"),
        *("-fsdev", f"local,id=results,path={results},{share}"),
        *("-device", "virtio-9p-pci,fsdev=results,mount_tag=results"),
        *("-kernel", str(vmlinuz), "-initrd", str(image)),
        *("-append", "console=ttyS0 quiet panic=-1"),
    ]
    deadline = time.monotonic() + limit_s
    said = ""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as guest:
        assert guest.stdout is not None
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(guest.stdout, selectors.EVENT_READ)
                while (left := deadline - time.monotonic()) > 0:
                    if not ready.select(left):
                        continue
                    text = os.read(guest.stdout.fileno(), 65536).decode(errors="replace")
                    if not text:
                        break
                    said += text
                    sys.stdout.write(text.replace("\r\n", "\n"))
                    sys.stdout.flush()
                else:
                    raise CannotRun(f"the guest did not end within {limit_s:g} s")
        finally:
            guest.kill()
    found = EXIT.search(said)
    if found is None:
        raise CannotRun("the guest ended without a word about its job")
    return int(found[1])


def main() -> int:
    """Fetch, boot, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="with mkernel installed")
    parser.add_argument("--native", type=Path, default=ROOT / "build/native", help="CMake's folder")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the guest")
    parser.add_argument("--job", default="sh tests/rxe/job", help="what the guest runs")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through boot, which ends the guest
    start = time.monotonic()
    install()
    kernel, busybox = fetch()
    variables = {
        "VENV": str(chosen.venv.absolute()),
        "NATIVE": str(chosen.native.absolute()),
        "RESULTS": "/run/results",
        "TMPDIR": "/run/tmp",
        "HOME": "/run",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    exports = "".join(f"export {k}={shlex.quote(v)}\n" for k, v in variables.items())
    with tempfile.TemporaryDirectory() as scratch:
        image = Path(scratch) / "initramfs"
        job = f"{exports}cd {shlex.quote(str(ROOT))} && {chosen.job}"
        image.write_bytes(initramfs(kernel, busybox, job))
        results = Path(scratch) / "results"
        results.mkdir()
        try:
            code = boot(kernel, image, results, chosen.limit)
        finally:
            shutil.rmtree(RESULTS, ignore_errors=True)
            shutil.copytree(results, RESULTS)
    print(f"rxe: {'passed' if code == 0 else 'FAILED'} in {time.monotonic() - start:.0f} s")
    return 1 if code else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CannotRun as reason:
        print(f"rxe: {reason}", file=sys.stderr)
        sys.exit(2)
