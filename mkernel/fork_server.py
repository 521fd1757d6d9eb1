"""The process that ranks are forked from, which imports mkernel and torch once for all of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from importlib.machinery import PathFinder
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

import mkernel
from mkernel.host_limits import make_socket_folder

also_imported: list[str] = []
"""Further modules that the server imports when it starts, with its first process, so that forks
need not import them. Only modules that start no threads are allowed."""


def context() -> ForkServerContext:
    """Return a context for processes that start as the server's forks do: with all of mkernel, no
    threads, and the environment of the server's start. Each calls :func:`leave_ctrl_c_to_parent`
    first."""
    made = multiprocessing.get_context("forkserver")
    # The server looks for modules in the working directory first (Python 3.11 and older even then when
    # this process does not). Where that has another mkernel, ranks import ours themselves.
    there = PathFinder.find_spec("mkernel", [""])
    ours = not (there and there.origin) or os.path.samefile(there.origin, str(mkernel.__file__))
    homes = sorted(set(mkernel.HOMES.values()))
    first, last = "mkernel.before_imports", "mkernel.before_fork"
    made.set_forkserver_preload([first, *homes, *also_imported, last] if ours else [])
    _start()
    return made


def leave_ctrl_c_to_parent() -> None:
    """Ignore Ctrl-C, which a terminal sends to all processes; it was blocked from the start of this
    one on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _start() -> None:
    """Start the server. Ctrl-C is blocked in it: its imports, which take seconds, and those of its
    forks must not get a KeyboardInterrupt."""
    make_socket_folder()
    resource_tracker.ensure_running()  # starting it later would unblock Ctrl-C
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
