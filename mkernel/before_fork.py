"""Lookups that each rank would otherwise repeat: the fork server imports this module last.

The server outlives a launcher that is killed, and then removes the folder of its socket, because
nobody else is left to do that.

Everything that the server has imported stays. If ranks collected garbage, they would traverse all
of that too, and write to each object's page, so each would have its own copy.
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


atexit.register(_remove_socket)  # ranks end without exit handlers
for _group in (ACCELERATORS, NICS):
    points(_group)
gc.freeze()
gc.enable()
