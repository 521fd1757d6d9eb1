"""Commands of the documentation run as they are written there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def commands(page: str, about: str) -> list[str]:
    """The commands of a page that contain a text, one a line."""
    blocks = re.findall(r"^ *```\n(.*?)^ *```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    joined = re.sub(r"\\\n *", "", "\n".join(blocks))
    return [line.strip() for line in joined.splitlines() if about in line]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def start(command: str) -> subprocess.Popen[str]:
    scripts = str(Path(sys.executable).parent)
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_first_world_of_a_cluster() -> None:
    """Step 5 of docs/nics.md by two agents of torchrun, as on two hosts, with the software device."""
    (written,) = commands("docs/nics.md", "torchrun")
    port = str(free_port())
    for old, new in (("NODE0", "127.0.0.1"), ("29500", port), ("=system", "=soft")):
        assert written.count(old) == 1
        written = written.replace(old, new)
    assert "--node-rank 0" in written
    agents = [start(written.replace("--node-rank 0", f"--node-rank {node}")) for node in range(2)]
    said = ""
    try:
        for agent in agents:
            said += agent.communicate(timeout=DEADLINE_S)[0]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], said
    ranks = sorted(re.findall(r"rank (\d) of 4 on node (\d): error", said))
    assert ranks == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")], said
