"""Commands of the documentation run as they are written there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from two_hosts import Host, two_hosts

from mkernel.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    *(page.relative_to(ROOT).as_posix() for page in sorted((ROOT / "docs").rglob("*.md"))),
]
DEADLINE_S = 240.0

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def commands(page: str, start: str) -> list[str]:
    """The commands of a page's blocks, settings before them aside, that begin like this."""
    blocks = re.findall(
        r"^ *```.*?\n(.*?)^ *```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )
    lines = re.sub(r"\\\n *", "", "\n".join(blocks)).splitlines()
    lines = [line.removeprefix("$ ") for line in lines]
    return [line.strip() for line in lines if re.match(rf" *([A-Z_]+=\S+ )*{start} ", line)]


def start(host: Host, command: str) -> subprocess.Popen[str]:
    scripts = str(Path(sys.executable).parent)
    return subprocess.Popen(
        host.command("bash", "-c", command),
        cwd=ROOT,
        env={**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def first_world(page: str, stand_ins: dict[str, str], *, one_name: bool) -> str:
    """The page's command of torchrun on two hosts; what they print.

    Args:
        stand_ins: for what the reader fills in or chooses, each once in the command.
    """
    written = commands(page, "torchrun")[0]
    assert "--node-rank 0" in written
    with two_hosts(one_name=one_name) as hosts:
        for old, new in {"NODE0": hosts[0].address, "HEX32": "5a" * 32, **stand_ins}.items():
            assert written.count(old) == 1, old
            written = written.replace(old, new)
        agents = [
            start(host, written.replace("--node-rank 0", f"--node-rank {node}"))
            for node, host in enumerate(hosts)
        ]
        said = ""
        try:
            for agent in agents:
                said += agent.communicate(timeout=DEADLINE_S)[0]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], said
    return said


@pytest.mark.parametrize(
    "stand_ins",
    [
        {"=system": "=soft"},
        {"=ascend": "=streams GLOO_SOCKET_IFNAME=wire", "--nproc-per-node 2": "--nproc-per-node 1"},
    ],
    ids=["ascend on cx7", "streams"],
)
def test_the_first_world_of_a_cluster(stand_ins: dict[str, str]) -> None:
    """Step 5 of docs/nics.md on two hosts. The software device stands in for NICs, and joins processes
    of one host only: these two have one name then, and networks apart."""
    said = first_world("docs/nics.md", stand_ins, one_name="=system" in stand_ins)
    each = 1 if "--nproc-per-node 2" in stand_ins else 2
    ranks = sorted(re.findall(rf"rank (\d) of {2 * each} on node (\d): error", said))
    assert ranks == [(str(rank), str(rank // each)) for rank in range(2 * each)], said


def test_the_command_for_gpus_is_the_one_that_ran() -> None:
    """The last of docs/nics.md's commands, which needs GPUs on two hosts."""
    ran, last = commands("docs/nics.md", "torchrun")
    stand_ins = {"=ascend": "=hopper", "--nproc-per-node 2": "--nproc-per-node 8"}
    for old, new in stand_ins.items():
        assert ran.count(old) == 1
        ran = ran.replace(old, new)
    assert last == ran


@pytest.mark.parametrize("page", PAGES)
def test_command_lines_have_the_options_that_pages_give_them(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("topo.xml").touch()  # a file that a page lets the reader have
    group = typer.main.get_command(app)
    for line in commands(page, "mkernel"):
        _, _, arguments = line.partition("mkernel ")
        name, *words = shlex.split(arguments, comments=True)
        command = group.get_command(None, name)  # type: ignore[attr-defined]
        assert command is not None, line
        command.make_context(name, words)  # parses, and runs nothing


def test_commands_are_found_in_the_readme() -> None:
    """Those in its last block too, behind one of Python."""
    names = [line.split()[1] for line in commands("README.md", "mkernel")]
    assert {"run", "plan", "probe", "doctor", "conformance", "bench"} <= set(names)
