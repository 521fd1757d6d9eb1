"""The initramfs that guests start from: busybox, kernel modules, an ``init`` and its job."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

from rxe_vm.packages import CannotRun

MODULES = (
    *("virtio_pci", "virtio_net", "macvlan", "9pnet_virtio", "9p"),
    *("crc32_generic", "ib_uverbs", "rdma_rxe"),
)
Entry = tuple[str, int, bytes, tuple[int, int]]


def in_order(files: dict[str, Path], wanted: tuple[str, ...]) -> list[Path]:
    """Modules with all that they depend on, each after what it needs."""
    ordered: dict[str, Path] = {}

    def add(name: str) -> None:
        if name in ordered:
            return
        if name not in files:
            raise CannotRun(f"the kernel has no module {name}; remove its folder and try again")
        said = re.search(rb"\0depends=([^\0]*)\0", files[name].read_bytes())
        for dependency in (said[1].decode() if said else "").split(","):
            if dependency:
                add(dependency.replace("-", "_"))
        ordered[name] = files[name]

    for name in wanted:
        add(name)
    return list(ordered.values())


def archive(entries: Iterator[Entry]) -> bytes:
    """A cpio archive ("newc") of (name, mode, content, device number) entries."""
    out = bytearray()
    for inode, (name, mode, content, device) in enumerate(entries, 1):
        path = name.encode() + b"\0"
        fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(path), 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + path
        out += bytes(-len(out) % 4)
        out += content
        out += bytes(-len(out) % 4)
    return bytes(out)


def initramfs(kernel: Path, busybox: Path, init: Path, job: str) -> bytes:
    """``kernel``, ``busybox``: folders with the unpacked packages. ``job``: text of /job."""
    files = {file.stem.replace("-", "_"): file for file in (kernel / "lib/modules").rglob("*.ko")}
    modules = in_order(files, MODULES)

    def entries() -> Iterator[Entry]:
        none = (0, 0)
        for folder in ("bin", "dev", "modules"):
            yield folder, stat.S_IFDIR | 0o755, b"", none
        # The first process's standard streams, before /dev is mounted.
        yield "dev/console", stat.S_IFCHR | 0o600, b"", (5, 1)
        yield "init", stat.S_IFREG | 0o755, init.read_bytes(), none
        yield "job", stat.S_IFREG | 0o644, job.encode(), none
        yield "bin/busybox", stat.S_IFREG | 0o755, (busybox / "bin/busybox").read_bytes(), none
        for module in modules:
            yield f"modules/{module.name}", stat.S_IFREG | 0o644, module.read_bytes(), none
        order = "\n".join(module.name for module in modules)
        yield "modules/order", stat.S_IFREG | 0o644, order.encode(), none
        yield "TRAILER!!!", 0, b"", none

    return archive(entries())
