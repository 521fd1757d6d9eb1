"""What hwloc, beyond our own sources, wants of a recorded tree: configuration space of PCI functions,
which says what buses lie below a bridge, and the CPUs of cores and packages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from machines import Machine, Placed, trees, write_sysfs


def write_tree(machine: Machine, root: Path) -> None:
    """The recorded tree of :func:`machines.write_sysfs`, complete enough for ``lstopo --input``."""
    files = write_sysfs(machine, root)
    cpus = {
        number: range(32 * number, 32 * number + socket.cpus)
        for number, socket in enumerate(machine.sockets)
    }
    everything = [cpu for each in cpus.values() for cpu in each]
    words = len(machine.sockets)
    system = "sys/devices/system"
    for name in ("online", "possible", "present"):
        files.write(f"{system}/cpu/{name}", ",".join(map(str, everything)) + "\n")
    for name in ("online", "possible"):
        files.write(f"{system}/node/{name}", ",".join(map(str, cpus)) + "\n")
    for number, own in cpus.items():
        files.write(f"{system}/node/node{number}/cpumap", _mask(own, words))
        for cpu in own:
            core = f"{system}/cpu/cpu{cpu}/topology"
            files.write(f"{core}/physical_package_id", f"{number}\n")
            files.write(f"{core}/core_id", f"{cpu}\n")
            files.write(f"{core}/core_cpus", _mask([cpu], words))
            files.write(f"{core}/package_cpus", _mask(own, words))
    files.write("proc/cpuinfo", "".join(f"processor\t: {cpu}\n\n" for cpu in everything))
    for tree in trees(machine):
        above = root / "sys/devices" / tree.host_bridge
        _configure(tree.root, above)
        for folder in (above, *(file.parent for file in above.rglob("class"))):
            (folder / "local_cpus").write_text(_mask(cpus[tree.socket], words))


def _mask(cpus: Iterable[int], words: int) -> str:
    bits = sum(1 << cpu for cpu in cpus)
    return (
        ",".join(f"{bits >> 32 * word & 0xFFFFFFFF:08x}" for word in reversed(range(words))) + "\n"
    )


def _configure(placed: Placed, above: Path) -> None:
    port = above / placed.port
    device = port / placed.address
    own, last = _bus(placed.address), _last_bus(placed)
    (port / "config").write_bytes(_configuration(port, own, last))
    below = (own + 1, last) if placed.below else ()
    (device / "config").write_bytes(_configuration(device, *below))
    for each in placed.below:
        _configure(each, device)


def _configuration(function: Path, *buses: int) -> bytes:
    """The 256 bytes that count: ids, class, and of a bridge the first and last bus below it."""
    space = bytearray(256)
    for offset, name in ((0, "vendor"), (2, "device"), (9, "class")):
        number = int((function / name).read_text(), 16)
        size = 3 if name == "class" else 2
        space[offset : offset + size] = number.to_bytes(size, "little")
    if buses:
        space[0x0E] = 1
        space[0x18], space[0x19], space[0x1A] = _bus(function.name), *buses
    return bytes(space)


def _bus(address: str) -> int:
    return int(address.split(":")[1], 16)


def _last_bus(placed: Placed) -> int:
    return max([_bus(placed.address), *map(_last_bus, placed.below)])
