"""The process that ranks are forked from: it has imported mkernel, and torch with it, once for all."""

from __future__ import annotations

import multiprocessing
import os
from importlib.machinery import PathFinder
from multiprocessing.context import ForkServerContext

import mkernel

also_imported: list[str] = []
"""Further modules that the server imports when it starts, with the first process of it, so that forks
need not each. Only such as start no threads."""


def context() -> ForkServerContext:
    """For processes that start as its forks do: with all of mkernel, no threads, and the environment
    of when it was started."""
    made = multiprocessing.get_context("forkserver")
    # The server looks for modules in the working directory first (Python 3.11 and older even then when
    # this process does not). Where that has another mkernel, ranks import ours themselves.
    there = PathFinder.find_spec("mkernel", [""])
    ours = not (there and there.origin) or os.path.samefile(there.origin, str(mkernel.__file__))
    homes = sorted(set(mkernel.HOMES.values()))
    made.set_forkserver_preload([*homes, *also_imported] if ours else [])
    return made
