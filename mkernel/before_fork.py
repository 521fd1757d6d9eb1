"""What ranks would each look up for themselves: the fork server imports this module last.

The server outlives a launcher that is killed, and then removes the folder of its socket, which nobody
else is left to do.

Whatever it has imported stays. Ranks that looked for garbage would look through all of that too, and
write to each object's page: each would have a copy of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
from multiprocessing import forkserver
from pathlib import Path

from mkernel.backends.registry import ACCELERATORS, NICS
from mkernel.installed import points

_LAUNCHER = os.getppid()


def _remove_socket() -> None:
    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    if address and os.getppid() != _LAUNCHER:
        with contextlib.suppress(OSError):
            Path(address).unlink()
            Path(address).parent.rmdir()


atexit.register(_remove_socket)  # ranks end without
for _group in (ACCELERATORS, NICS):
    points(_group)
gc.freeze()
gc.enable()
