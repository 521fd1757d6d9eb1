"""The program of docs/groups.md runs as it is written there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def test_the_program(torchrun: list[str], tmp_path: Path) -> None:
    (program,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/groups.md").read_text(), re.DOTALL
    )
    script = tmp_path / "program.py"
    script.write_text(program)
    ended = subprocess.run(
        [*torchrun, "--nproc-per-node", "4", str(script)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "MKERNEL_TIMEOUT_S": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    for rank in range(4):
        assert (
            f"rank {rank}: {rank % 2} of 2, {rank // 2} of 2, [128, 128], [64, 128]" in ended.stdout
        )
