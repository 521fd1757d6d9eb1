"""The process that ranks are forked from: it has imported mkernel, and torch with it, once for all."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

from mkernel import HOMES


def context() -> ForkServerContext:
    """For processes that start as its forks do: with all of mkernel, no threads, and the environment
    of when it was started."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(sorted(set(HOMES.values())))
    # Its own import path would begin with the working directory, whatever ours is. There may be a
    # folder named mkernel there, as in this project's tree, which is not the package.
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before
    return made
