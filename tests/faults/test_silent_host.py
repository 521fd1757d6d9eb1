"""A whole host falls silent, or dies: the ranks of the other one learn it from its heartbeats alone.

The hosts are PID and UTS namespaces where this process may make them, so that their processes cannot
see each other as they could not across machines; else processes that call themselves another host.
"""

from __future__ import annotations

import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch.distributed import TCPStore

import mkernel
from mkernel.errors import PeerFailure, WorldError
from mkernel.launch import host_store
from mkernel.world import join

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

HEARTBEAT_S = 0.2
SILENCE_S = 50 * HEARTBEAT_S
DEADLINE_S = 240.0
"""Every other wait lasts so long: far beyond the silence that must be noticed, however busy the machine
is."""
_APART = ["unshare", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child"]


@functools.cache
def may_unshare() -> bool:
    try:
        return subprocess.run([*_APART, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


# ---- a host's processes --------------------------------------------------------------------------


def be_host(host: str, first: int, ranks: int, port: int, calls: bool) -> None:
    """Make a process of each of the host's ranks, and stay until all have ended."""
    for rank in range(first, first + ranks):
        if os.fork() == 0:
            os.environ["RANK"] = str(rank)
            take_part(host, ranks, port, calls)
            return
    for _ in range(ranks):
        os.wait()


def take_part(host: str, ranks: int, port: int, calls: bool) -> None:
    """Join the world, say so, and go on until it breaks; say how."""
    if not may_unshare():
        join.host_identity = lambda: host
    one, two = (TCPStore("127.0.0.1", port, wait_for_workers=False) for _ in range(2))
    world = mkernel.init(
        nodes=2, ranks_per_node=ranks, accelerator="streams", timeout_s=DEADLINE_S,
        stores=(one, two),
    )  # fmt: skip
    call()
    world.barrier()
    say({"ready": True})
    try:
        while True:
            if calls:
                call()
            else:
                time.sleep(HEARTBEAT_S)
                world.synchronize()
    except WorldError as error:
        peer = error.peer if isinstance(error, PeerFailure) else None
        say({"kind": type(error).__name__, "peer": peer, "message": str(error)})
        mkernel.finalize(error)


def call() -> None:
    mkernel.all_gather_gemm(torch.randn(32, 64), torch.randn(64, 32))


def say(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")  # at once: the ranks of a host share the pipe
    sys.stdout.flush()


# ---- the test's own process ----------------------------------------------------------------------


class Host:
    """Rank processes that are killed, stopped and read together."""

    def __init__(self, name: str, first: int, ranks: int, port: int, calls: bool) -> None:
        self.ranks = range(first, first + ranks)
        self.process = subprocess.Popen(
            [
                *(_APART if may_unshare() else []), sys.executable, __file__,
                name, *map(str, (first, ranks, port, int(calls))),
            ],
            env={
                **os.environ,
                "WORLD_SIZE": str(2 * ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MKERNEL_JOB_SECRET": "two hosts of one test",
                "MKERNEL_HEARTBEAT_S": str(HEARTBEAT_S),
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            bufsize=0,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.output: IO[bytes] = self.process.stdout

    def told(self) -> list[dict[str, Any]]:
        """The next thing that each of the ranks says."""
        said, end = b"", time.monotonic() + DEADLINE_S
        while said.count(b"\n") < len(self.ranks):
            ready, _, _ = select.select([self.output], [], [], max(0.0, end - time.monotonic()))
            more = self.output.read(4096) if ready else b""
            assert more, f"a rank says nothing; the others: {said!r}"
            said += more
        return [json.loads(line) for line in said.splitlines()]

    def strike(self, number: signal.Signals) -> None:
        """Send all of its processes a signal."""
        for process in _below(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def end(self) -> None:
        """Nothing of it is left when this returns."""
        self.strike(signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.output.close()


def _below(root: int) -> list[int]:
    """Processes that descend from one, parents first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found[1:]


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[tuple[Host, Host]]:
    """Two hosts of as many ranks each, in one world that has made a call."""
    ranks, calls = request.param
    store, port = host_store(2 * ranks, DEADLINE_S)
    made: list[Host] = []
    try:
        for name, first in (("here", 0), ("there", ranks)):
            made.append(Host(name, first, ranks, port, calls))
        assert [told for host in made for told in host.told()] == [{"ready": True}] * 2 * ranks
        yield made[0], made[1]
    finally:
        for host in made:
            host.end()
        del store


@pytest.mark.parametrize(
    ("hosts", "how"),
    [((2, True), signal.SIGSTOP), ((8, False), signal.SIGKILL)],
    ids=["two-stopped-in-calls", "eight-killed-between-calls"],
    indirect=["hosts"],
)
def test_a_silent_host_is_a_peer_failure_everywhere(
    hosts: tuple[Host, Host], how: signal.Signals
) -> None:
    here, there = hosts
    start = time.monotonic()
    there.strike(how)
    first, *others = here.told()
    seconds = time.monotonic() - start
    assert others == [first] * (len(here.ranks) - 1)
    assert first["kind"] == "PeerFailure"
    assert first["peer"] in there.ranks
    assert re.search(rf"\brank {first['peer']}\b", first["message"]), first
    silent = re.search(r"\bsilent for ([\d.]+) s", first["message"])
    assert silent, first
    assert float(silent[1]) >= SILENCE_S
    everyone = ", ".join(map(str, there.ranks))
    assert "as have all ranks of host " in first["message"]
    assert f"({everyone}): it may be down" in first["message"]
    assert seconds < DEADLINE_S / 2


if __name__ == "__main__":
    be_host(sys.argv[1], *map(int, sys.argv[2:]))
