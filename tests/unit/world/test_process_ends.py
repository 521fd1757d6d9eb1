"""What becomes of a world in a process that exits without ``finalize``, and in its forked children."""

from __future__ import annotations

import os
import subprocess
import sys

LIMIT_S = 240
_ALONE = "import mkernel, torch; mkernel.init(accelerator='streams'); x = torch.ones(2, 8)\n"

_EXITS = f"""
import atexit, threading
def watching():
    print([each.name for each in threading.enumerate() if "watchdog" in each.name])
atexit.register(watching)  # runs after what is registered from now on
{_ALONE}
watching()
"""

_FORKS = f"""
import os, sys
{_ALONE}
mkernel.all_reduce(x)
world = mkernel.world()
child = os.fork()
if child == 0:
    for group in (None, world):
        try:
            mkernel.all_reduce(x, group=group)
        except mkernel.errors.NotInitialized as error:
            print(error, flush=True)
    mkernel.finalize()
    print(mkernel.is_initialized(), flush=True)
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(mkernel.all_reduce(x).sum().item(), mkernel.is_initialized())
mkernel.finalize()
"""


def output(script: str) -> list[str]:
    told = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "MKERNEL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={
            **kept,
            "MKERNEL_TIMEOUT_S": "30",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_process_that_exits_without_finalize_stops_its_watchdog_first() -> None:
    """A daemon thread that Python ends inside of torch's store aborts the process: "terminate called
    without an active exception", one exit of twelve with a heartbeat of a millisecond."""
    assert output(_EXITS) == ["['mkernel-watchdog']", "[]"]


def test_a_forked_child_is_in_no_world_and_disturbs_none() -> None:
    """Its calls once waited for threads that only the parent has, and then ended the parent's world."""
    default, ended, *rest = output(_FORKS)
    assert "forked from one that is in a world" in default
    assert "has ended" in ended
    assert rest == ["False", "0", "16.0 True"]
