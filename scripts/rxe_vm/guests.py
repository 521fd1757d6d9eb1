"""Two guests that two cables join: they boot at once, and each says how its job ended.

The cables are socket pairs, so nothing of the guests' network can be seen or reached from outside.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import socket
import subprocess
import time
from pathlib import Path

from rxe_vm.packages import CannotRun

GUESTS = 2
CABLES = ("data", "control")  # in this order eth0, which carries RDMA, and eth1
EXIT = re.compile(r"rxe-guest: exit (\d+)")


def command(number: int, kernel: Path, image: Path, results: Path, cables: list[int]) -> list[str]:
    """QEMU's, with ``results`` the one folder that the guest may write to."""
    (vmlinuz,) = (kernel / "boot").glob("vmlinuz-*")
    share = "security_model=none,multidevs=remap"
    words = [
        *("qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max"),
        *("-smp", str(min(4, os.cpu_count() or 1)), "-m", "2048"),
        *("-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"),
        *("-fsdev", f"local,id=root,path=/,readonly=on,{share}"),
        *("-device", "virtio-9p-pci,fsdev=root,mount_tag=root"),
        *("-fsdev", f"local,id=results,path={results},{share}"),
        *("-device", "virtio-9p-pci,fsdev=results,mount_tag=results"),
        *("-kernel", str(vmlinuz), "-initrd", str(image)),
        # On a busy host the emulated timer is late, which the kernel would take for a broken one.
        *("-append", f"console=ttyS0 quiet panic=-1 no_timer_check GUEST={number}"),
    ]
    for cable, fd in enumerate(cables):
        words += ["-netdev", f"socket,id={CABLES[cable]},fd={fd}"]
        mac = f"52:54:00:00:{cable:02x}:{number:02x}"
        words += ["-device", f"virtio-net-pci,netdev={CABLES[cable]},mac={mac},romfile="]
    return words


class Guest:
    """A booted machine and what its console said."""

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.number = number
        self.console = process.stdout
        self._process = process
        self._rest = ""
        self.code: int | None = None
        """Of its job, once that has ended."""

    def read(self) -> bool:
        """Show what the console says now, line by line; False at its end."""
        text = os.read(self.console.fileno(), 65536).decode(errors="replace")
        *lines, self._rest = (self._rest + text.replace("\r", "")).split("\n")
        for line in lines:
            print(f"[{self.number}] {line}", flush=True)
            if found := EXIT.search(line):
                self.code = int(found[1])
        return bool(text)

    def end(self) -> None:
        """The process is gone when this returns."""
        self._process.kill()
        self._process.wait()
        self.console.close()


def boot(kernel: Path, image: Path, results: Path, limit_s: float) -> bool:
    """Run the guests to their ends, their consoles on ours; whether both said that their jobs passed.

    The first that fails ends the other. CannotRun: one ended without a word, or took too long.

    Args:
        results: guest N may write to the folder ``results/N``.
    """
    with contextlib.ExitStack() as stack:
        ends: list[list[socket.socket]] = [[] for _ in range(GUESTS)]
        for _ in CABLES:
            for number, end in enumerate(socket.socketpair()):
                ends[number].append(stack.enter_context(end))
        ready = stack.enter_context(selectors.DefaultSelector())
        guests = []
        for number in range(GUESTS):
            own = results / str(number)
            own.mkdir()
            fds = [end.fileno() for end in ends[number]]
            process = subprocess.Popen(
                command(number, kernel, image, own, fds),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
            )
            guests.append(Guest(number, process))
            stack.callback(guests[-1].end)
            ready.register(guests[-1].console, selectors.EVENT_READ, guests[-1])
        deadline = time.monotonic() + limit_s
        while ready.get_map() and not any(guest.code for guest in guests):
            for key, _ in ready.select(max(0.0, deadline - time.monotonic())):
                guest: Guest = key.data
                if not guest.read():
                    ready.unregister(guest.console)
                    if guest.code is None:
                        raise CannotRun(f"guest {guest.number} ended without a word about its job")
            if time.monotonic() > deadline:
                raise CannotRun(f"the guests did not end within {limit_s:g} s")
        return all(guest.code == 0 for guest in guests)
