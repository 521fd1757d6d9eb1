"""Builds small system trees, as sysfs shows them, for the tests of the sources."""

from __future__ import annotations

from pathlib import Path


class SysfsTree:
    """A recorded machine under a folder. Every method may be left out: holes are the point."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys").mkdir(parents=True, exist_ok=True)

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def numa(self, node: int, cpulist: str, kib: int | None = 1024) -> None:
        base = f"sys/devices/system/node/node{node}"
        self.write(f"{base}/cpulist", f"{cpulist}\n")
        if kib is not None:
            self.write(f"{base}/meminfo", f"Node {node} MemTotal:       {kib} kB\n")

    def pci(
        self,
        path: str,
        *,
        numa: str | None = "0\n",
        vendor: str = "0x15b3\n",
        link: tuple[str, str] | None = None,
        **files: str,
    ) -> Path:
        """A PCI function, by its path below ``sys/devices`` (host bridge, bridges, function).

        ``link``: speed and width, as the function and the port above it show them. ``files``: more
        files of the function, as ``class_="0x030200"``.
        """
        folder = self.root / "sys/devices" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "vendor").write_text(vendor)
        if numa is not None:
            (folder / "numa_node").write_text(numa)
        for name, text in files.items():
            (folder / name.rstrip("_")).write_text(text)
        if link is not None:
            for side in (folder, folder.parent):
                for name in ("max_link_speed", "current_link_speed"):
                    (side / name).write_text(f"{link[0]}\n")
                for name in ("max_link_width", "current_link_width"):
                    (side / name).write_text(f"{link[1]}\n")
        entry = self.root / "sys/bus/pci/devices" / folder.name
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.symlink_to(Path("../../../devices") / path)
        return folder

    def rdma(
        self,
        name: str,
        function: Path | None,
        *,
        port: int = 1,
        state: str | None = "4: ACTIVE\n",
        rate: str | None = "400 Gb/sec (4X NDR)\n",
        link_layer: str | None = "InfiniBand\n",
    ) -> None:
        """A port of an RDMA device on a PCI function (None: a virtual device)."""
        parent = function or self.root / "sys/devices/virtual"
        folder = parent / "infiniband" / name
        ports = folder / "ports" / str(port)
        ports.mkdir(parents=True, exist_ok=True)
        for file, text in (("state", state), ("rate", rate), ("link_layer", link_layer)):
            if text is not None:
                (ports / file).write_text(text)
        if function is not None and not (folder / "device").exists():
            (folder / "device").symlink_to("../..")
        link = self.root / "sys/class/infiniband" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(Path("../../..") / folder.relative_to(self.root))
