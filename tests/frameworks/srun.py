"""Stands in for SLURM's ``srun`` and ``scontrol`` in a batch script's test: ``srun.py srun COMMAND``,
with the variables of a batch script in the environment.

It starts each task of the job step as a process of this machine, with the variables that srun sets,
and takes no option but those that the script has. SLURM itself is not here: this does not test what
places tasks on hosts, gives them devices and ends them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping

OPTIONS = ("--kill-on-bad-exit=1",)


def step(batch: Mapping[str, str], number: int) -> list[dict[str, str]]:
    """List what srun adds to each task's environment, by its manual (OUTPUT ENVIRONMENT VARIABLES)."""
    nodes, each = int(batch["SLURM_NNODES"]), int(batch["SLURM_NTASKS_PER_NODE"])
    everywhere = {
        "SLURM_STEP_ID": str(number), "SLURM_STEP_NODELIST": batch["SLURM_JOB_NODELIST"],
        "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_NUM_TASKS": str(nodes * each),
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})" if nodes > 1 else str(each),
        "SLURM_NTASKS": str(nodes * each),
    }  # fmt: skip
    return [
        {
            **everywhere,
            "SLURM_PROCID": str(task), "SLURM_NODEID": str(task // each),
            "SLURM_LOCALID": str(task % each),
        }
        for task in range(nodes * each)
    ]  # fmt: skip


def srun(*words: str) -> int:
    """Start the tasks, and wait. Return the first code that is not 0; who fails ends the others."""
    command = list(words)
    while command[0].startswith("-"):
        if (option := command.pop(0)) not in OPTIONS:
            raise SystemExit(f"the stand-in for srun has no {option}")
    tasks = [subprocess.Popen(command, env={**os.environ, **own}) for own in step(os.environ, 0)]
    waiting = list(tasks)
    code = 0
    try:
        while waiting and code == 0:
            time.sleep(0.05)
            ended = [task for task in waiting if task.poll() is not None]
            waiting = [task for task in waiting if task not in ended]
            code = next((task.returncode for task in ended if task.returncode), 0)
    finally:
        for task in waiting:
            task.kill()
            task.wait()
    return code


def scontrol(*words: str) -> int:
    """``show hostnames LIST``, of a list without brackets."""
    assert words[:2] == ("show", "hostnames")
    print(words[2].replace(",", "\n"))
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](*sys.argv[2:]))
