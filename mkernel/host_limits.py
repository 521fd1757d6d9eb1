"""Checks of what this host lets a process do, made before anything relies on it."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import struct
import tempfile
from multiprocessing import util
from pathlib import Path

from mkernel.errors import ArgumentError, BackendUnavailable

_SIOCGIFADDR = 0x8915
_MOST_FOLDER = 75
"""Most bytes of the path of a folder in which multiprocessing's sockets have a legal name: at most
107 bytes, of which ``/pymp-XXXXXXXX/listener-XXXXXXXX`` takes 32."""


def check_descriptors(wanted: int, what: str) -> None:
    """Raise OSError if this process may not open the ``wanted`` further descriptors that ``what``
    opens."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    left = limit - sum(int(each) < limit for each in os.listdir("/proc/self/fd"))
    if left < wanted:
        raise OSError(
            errno.EMFILE,
            f"{what} opens {wanted} descriptors, and this process may open {left} more: close some, or "
            f"raise the limit of {limit} (`ulimit -n`)",
        )


def check_loopback() -> None:
    """Raise BackendUnavailable if processes of this host do not reach each other at 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(("127.0.0.1", 0))
            probe.connect(("127.0.0.1", 9))  # which sends nothing
        except OSError as error:
            raise BackendUnavailable(
                f"the ranks of a host meet at 127.0.0.1, which is not there ({error.strerror}); bring "
                "the loopback interface up: `ip link set lo up`, with the address 127.0.0.1/8"
            ) from error


def check_gloo_interfaces() -> None:
    """Raise ArgumentError if GLOO_SOCKET_IFNAME names an interface that has no address here."""
    given = os.environ.get("GLOO_SOCKET_IFNAME", "")
    known = [name for _, name in socket.if_nameindex()]
    if not all(_has_address(name) for name in filter(None, given.split(","))):
        legal = ", ".join(filter(_has_address, known)) or "none has an address now"
        raise ArgumentError("GLOO_SOCKET_IFNAME", given, f"interfaces of this host: {legal}")


def _has_address(interface: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)[:15]))
            return True
        except OSError:
            pass
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return False
    return any(line.split()[-1] == interface for line in lines)


def make_socket_folder() -> None:
    """Make multiprocessing put its sockets into a folder where their names are short enough.

    Raises:
        ArgumentError: TMPDIR is too long, and no other folder can be written. BackendUnavailable: there
            is no folder for temporary files.
    """
    try:
        usual = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise BackendUnavailable(
            f"no folder for temporary files can be written ({error.strerror}); set TMPDIR to one"
        ) from error
    fitting = (each for each in (usual, "/tmp", "/var/tmp", "/dev/shm") if _fits(each))
    chosen = next(fitting, None)
    if chosen is None:
        legal = f"a folder that can be written, with a path of at most {_MOST_FOLDER} bytes"
        raise ArgumentError("TMPDIR", usual, legal, why="sockets in it would have too long names")
    tempfile.tempdir = chosen
    try:
        util.get_temp_dir()  # kept for the process; made where there is none yet
    finally:
        tempfile.tempdir = usual


def _fits(folder: str) -> bool:
    return len(os.fsencode(folder)) <= _MOST_FOLDER and os.access(folder, os.W_OK | os.X_OK)
