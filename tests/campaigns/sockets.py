"""The sockets of a process and who has their other ends, from /proc."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_LISTENING = "0A"
_STATES = {"01": "established", "08": "closed by the other end", _LISTENING: "listening"}
_KINDS = ("tcp", "tcp6", "udp", "udp6", "unix")


class _Ends(NamedTuple):
    """A socket of the host. ``local``, ``remote`` and ``state`` are as /proc has them."""

    kind: str
    local: str = ""
    remote: str = ""
    state: str = ""

    def __str__(self) -> str:
        if self.kind == "unix":
            return f"unix {self.local}".rstrip()
        state = _STATES.get(self.state, f"state {self.state}")
        to = "" if self.state == _LISTENING else f" to {_address(self.remote)}"
        return f"{self.kind} {_address(self.local)}{to}, {state}"


def sockets(*, owners: bool = False) -> dict[str, str]:
    """Describe each socket of this process, by its name among descriptors: kind, addresses, state.
    ``owners``: also which process of this host has a connection's other end; looks through all."""
    known = _of_host()
    mine = {name for name in _descriptors("self") if name.startswith("socket:")}
    found = {name: str(known.get(name, "of another kind")) for name in mine}
    if owners:
        by_ends = {ends[:3]: name for name, ends in known.items()}
        who = _owners()
        for name in mine & known.keys():
            kind, local, remote, state = known[name]
            if kind.startswith("tcp") and state != _LISTENING:
                other = by_ends.get((kind, remote, local), "")
                found[name] += f", other end in {who.get(other, 'no process here')}"
    return found


def new_sockets(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Describe the sockets that are new."""
    return "; ".join(sorted(what for name, what in now.items() if name not in before))


def _of_host() -> dict[str, _Ends]:
    found = {}
    for kind in _KINDS:
        with contextlib.suppress(OSError):  # a kernel without that kind
            lines = Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:]
            for fields in map(str.split, lines):
                if kind == "unix":
                    found[f"socket:[{fields[6]}]"] = _Ends(kind, " ".join(fields[7:]))
                else:
                    found[f"socket:[{fields[9]}]"] = _Ends(kind, *fields[1:4])
    return found


def _descriptors(process: str) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):  # it ended, or is another user's
        for entry in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):  # the one that lists them
                found.add(os.readlink(f"/proc/{process}/fd/{entry}"))
    return found


def _owners() -> dict[str, str]:
    """Map each socket to the process that has it."""
    found = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        held = [name for name in _descriptors(process) if name.startswith("socket:")]
        found.update(dict.fromkeys(held, f"process {process}"))
    return found


def _address(told: str) -> str:
    """``0100007F:B0D1``, words of an address in the order of this machine, as ``127.0.0.1:45265``."""
    words, _, port = told.partition(":")
    host = b"".join(
        struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8)
    )
    family = socket.AF_INET if len(host) == 4 else socket.AF_INET6
    return f"{socket.inet_ntop(family, host)}:{int(port, 16)}"
