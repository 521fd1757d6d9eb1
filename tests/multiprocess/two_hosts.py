"""Two hosts on one machine: two network namespaces with a cable between them, and a name each.

Nothing lies on a file system, and both are gone with the processes that hold them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_STEP_S = 20.0


@dataclass(frozen=True)
class Host:
    """``pid``: of the process that holds its namespaces."""

    name: str
    address: str
    pid: int

    def command(self, *words: str) -> list[str]:
        """What runs a command on this host."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--", *words]

    def run(self, *words: str) -> str:
        """A command's output; CalledProcessError."""
        done = subprocess.run(
            self.command(*words), check=True, capture_output=True, text=True, timeout=_STEP_S
        )
        return done.stdout


def _cannot() -> str:
    """Why there can be no hosts here; "" where there can."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} here"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "true"],
        capture_output=True,
        text=True,
        timeout=_STEP_S,
        check=False,
    )
    return tried.stderr.strip()


@contextlib.contextmanager
def two_hosts(*, one_name: bool = False) -> Iterator[tuple[Host, Host]]:
    """They reach each other, and nothing else. Skips the test where the user may not make them; CI may.

    Args:
        one_name: both have the same, so that mkernel takes their processes for those of one host, which
            the software device needs.
    """
    if why := _cannot():
        assert not os.environ.get("CI"), why
        pytest.skip(f"no network namespaces: {why}")
    with contextlib.ExitStack() as stack:
        hosts = []
        for index in range(2):
            holder = subprocess.Popen(
                ["unshare", "--net", "--uts", "sh", "-c", "echo made; exec sleep 3600"],
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(holder.wait)
            stack.callback(holder.kill)
            assert holder.stdout is not None
            stack.callback(holder.stdout.close)
            assert holder.stdout.readline() == "made\n"
            name = "mk-host" if one_name else f"mk-host{index}"
            hosts.append(Host(name, f"10.77.0.{index + 1}", holder.pid))
        one, two = hosts
        ends = ("wire", "type", "veth", "peer", "name", "wire", "netns", str(two.pid))
        one.run("ip", "link", "add", *ends)
        for host in hosts:
            host.run("hostname", host.name)
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                host.run("ip", "link", "set", device, "up")
        yield one, two
