"""Work whose result several tests want is done once in a session, by whichever worker comes first.

A module's fixture is made again in each worker that gets some of the module's tests.
"""

from __future__ import annotations

import fcntl
import pickle
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


def once(request: pytest.FixtureRequest, work: Callable[[], T], name: str = "") -> T:
    """The result of ``work``, of the fixture that asks, or of all that ask by that ``name``; it is
    pickled. Where ``work`` raises, the next worker does it again."""
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    folder = factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # of one worker
        folder = folder.parent
    result = folder / f"{name or f'{request.path.stem}-{request.fixturename}'}.pickle"
    with result.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            made = pickle.dumps(work())
            result.write_bytes(made)
    return pickle.loads(result.read_bytes())  # type: ignore[no-any-return]
