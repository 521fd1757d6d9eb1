"""The batch script for SLURM, run by bash with stand-ins for `srun` and `scontrol` (srun.py)."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "frameworks" / "slurm.sbatch"
STAND_IN = Path(__file__).with_name("srun.py")
LIMIT_S = 250
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "TORCHELASTIC_", "MKERNEL_")
"""Beginnings of the variables that tell a process which rank it is, and of mkernel's settings."""

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


def options(script: Path) -> dict[str, str]:
    """sbatch's options, as the script has them."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", script.read_text(), re.MULTILINE))


def batch(tmp_path: Path, **changed: str) -> dict[str, str]:
    """The environment that sbatch gives a batch script on two nodes, of which this machine is both."""
    commands = tmp_path / "bin"
    commands.mkdir()
    starts = {"python": "", "srun": f"{STAND_IN} srun", "scontrol": f"{STAND_IN} scontrol"}
    for name, words in starts.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (commands / name).chmod(0o755)
    asked = {**options(SCRIPT), **changed}
    nodes, each = int(asked["nodes"]), int(asked["ntasks-per-node"])
    assert nodes == 2
    kept = {name: value for name, value in os.environ.items() if not name.startswith(TOLD)}
    return {
        **kept,
        "HOME": str(tmp_path), "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "SLURM_JOB_ID": str(free_ports() - 15000), "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "localhost,other", "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes * each), "SLURM_NTASKS_PER_NODE": str(each),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "MKERNEL_ACCELERATOR": "streams", "MKERNEL_TIMEOUT_S": "100",
    }  # fmt: skip


def free_ports() -> int:
    """A port that a SLURM job may be given, such that its script's other one is free too."""
    while True:
        port = random.randrange(15000, 29000)
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 1000))
            except OSError:
                continue
        return port


def run(script: Path, environment: dict[str, str]) -> tuple[int, str]:
    job = subprocess.Popen(
        ["bash", str(script)], env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = job.communicate(timeout=LIMIT_S)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    return job.returncode, said


def test_the_script_asks_for_a_task_on_each_gpu() -> None:
    asked = options(SCRIPT)
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert asked.keys() == {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "time"}


def test_its_steps_find_their_ranks(tmp_path: Path) -> None:
    """One that calls mkernel.init() alone, and one that initialises torch.distributed first."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    code, said = run(SCRIPT, batch(tmp_path, **{"ntasks-per-node": "1"}))
    assert code == 0, said
    alone = re.findall(r"rank (\d) of 2 on node (\d): error", said)
    assert sorted(alone) == [("0", "0"), ("1", "1")], said
    models = re.findall(r"rank (\d) on streams: llama: losses differ by .*? 32 of 32 tokens", said)
    assert sorted(models) == ["0", "1"], said


def test_a_step_that_fails_fails_the_job(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.sbatch"
    first = "python examples/all_gather_gemm.py"
    assert SCRIPT.read_text().count(first) == 1
    fails = """bash -c 'echo "task $SLURM_PROCID"; exit 3'"""
    wrong.write_text(SCRIPT.read_text().replace(first, fails))
    code, said = run(wrong, batch(tmp_path, **{"ntasks-per-node": "1"}))
    assert code == 3
    assert set(said.split("\n")) <= {"", "task 0", "task 1"}
