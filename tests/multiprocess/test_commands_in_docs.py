"""Commands of the documentation run as they are written there."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from mkernel.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
DEADLINE_S = 240.0

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def commands(page: str, start: str) -> list[str]:
    """The commands of a page's blocks, settings before them aside, that begin like this."""
    blocks = re.findall(
        r"^ *```\w*\n(.*?)^ *```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )
    lines = re.sub(r"\\\n *", "", "\n".join(blocks)).splitlines()
    return [line.strip() for line in lines if re.match(rf" *([A-Z_]+=\S+ )*{start} ", line)]


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
    stand_ins = {"NODE0": "127.0.0.1", "29500": port, "=system": "=soft", "HEX32": "0" * 64}
    for old, new in stand_ins.items():
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


def test_the_readme_s_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    promise = re.search(r"^It prints `(.+?)`, and the same for rank 1\.", readme, re.MULTILINE)
    assert promise is not None
    (tmp_path / "example.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stdout.splitlines() == [promise[1], promise[1].replace("rank 0", "rank 1")]
    assert done.returncode == 0


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
