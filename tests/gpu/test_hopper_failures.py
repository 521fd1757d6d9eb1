"""What breaks on GPUs: an absent rank, a killed one, and what the sanitizers see."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import hopper_ranks
import pytest
from device_buffers import several, takes_ranks
from hopper_ranks import OPS, Shape
from survivors import judge_absence, judge_survivors

pytestmark = [takes_ranks(2), pytest.mark.usefixtures("leaves_nothing")]

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


@several
@pytest.mark.parametrize("path", ["fused", "library"])
@pytest.mark.parametrize("op", OPS)
def test_an_absent_rank_is_a_time_out_that_says_who_waited_for_what(
    op: str, path: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_PATH", path)
    judge_absence("hopper", Shape(op, 1024, 512, 512), world, absent_s=10.0)


@several
@pytest.mark.parametrize("op", OPS)
def test_a_rank_killed_while_kernels_wait_for_it(op: str, world: int) -> None:
    judge_survivors("hopper", Shape(op, 1536, 512, 512), world)


@pytest.mark.timeout(400)
@pytest.mark.skipif(not Path(SANITIZER).exists(), reason="compute-sanitizer is not installed")
@pytest.mark.parametrize(
    ("tool", "path"),
    [
        ("memcheck", "fused"),
        ("memcheck", "library"),
        ("racecheck", "fused"),
        ("synccheck", "fused"),
        ("synccheck", "library"),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_sanitizer(tmp_path: Path, op: str, tool: str, path: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        SANITIZER, "--tool", tool, "--error-exitcode", "86",
        "--kernel-name", "kernel_substring=mkernel",  # torch's kernels are not ours to judge
        sys.executable, hopper_ranks.__file__, op, "512", "264", "200",
    ]  # fmt: skip
    logs = [tmp_path / f"rank{rank}" for rank in range(2)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            environment = {
                "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MKERNEL_PATH": path,
            }  # fmt: skip
            with log.open("w") as file:
                ranks.append(
                    subprocess.Popen(
                        command,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **{k: str(v) for k, v in environment.items()}},
                    )
                )
        for process in ranks:
            process.wait(350)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for process, log in zip(ranks, logs, strict=True):
        text = log.read_text()
        assert process.returncode == 0, text[-3000:]
        assert "right" in text
