"""How a rank leaves its world: what it opened is closed, and memory that may still be written stays."""

from __future__ import annotations

from typing import Any

import pytest

from mkernel.errors import Timeout
from mkernel.world.join import Membership


class Failure:
    """``stuck``: its watchdog does not end."""

    def __init__(self) -> None:
        self.stuck = False

    def stop(self) -> None:
        if self.stuck:
            raise Timeout("the watchdog goes on")

    def close(self) -> None:
        pass


class Engine:
    """Whose kernels ended, if it is ``quiet``; ``freed``: what its memory's ``free`` was told."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.freed: list[bool] = []

    def close(self) -> bool:
        return self.quiet

    def free(self, *, quiet: bool) -> None:
        self.freed.append(quiet)


def member(*engines: Engine) -> Membership:
    nobody: Any = None
    failure: Any = Failure()
    made = Membership("test", None, nobody, nobody, nobody, nobody, failure)
    made.engines = dict(zip("ab", engines, strict=False))  # type: ignore[arg-type]
    return made


def test_memory_that_kernels_may_touch_is_kept() -> None:
    engines = Engine(True), Engine(False)
    member(*engines).leave()
    assert [each.freed for each in engines] == [[True], [False]]


def test_memory_that_a_nic_session_may_write_is_kept() -> None:
    def close() -> None:
        raise Timeout("a thread goes on")

    engine = Engine(True)
    left = member(engine)
    left._undo.callback(close)
    with pytest.raises(Timeout, match="goes on"):
        left.leave()
    assert engine.freed == [False]


def test_memory_that_a_watchdog_may_write_is_kept() -> None:
    """It writes the abort word when it hears of a failure."""
    engine, closed = Engine(True), []
    left = member(engine)
    left._undo.callback(lambda: closed.append("the session"))
    left._failure.stuck = True  # type: ignore[attr-defined]
    with pytest.raises(Timeout, match="the watchdog goes on"):
        left.leave()
    assert (engine.freed, closed) == ([False], ["the session"])
