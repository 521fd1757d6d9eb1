"""The watchdog beats from the join on, in its own thread: it may ask for a state at any time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import mkernel
from mkernel.world.failure import FailureMonitor


class AskedAtOnce:
    """``FailureMonitor.elsewhere``, which a heartbeat asks as soon as it is set."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __set__(self, monitor: FailureMonitor, ask: Callable[[], str]) -> None:
        self.asked.append(ask())
        vars(monitor)["elsewhere"] = ask

    def __get__(self, monitor: FailureMonitor, owner: type) -> Callable[[], str]:
        return vars(monitor)["elsewhere"]  # type: ignore[no-any-return]


def test_a_heartbeat_while_a_world_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = AskedAtOnce()
    monkeypatch.setattr(FailureMonitor, "elsewhere", asked, raising=False)
    mkernel.init(accelerator="ascend")
    mkernel.finalize()
    assert asked.asked == ["", "", ""]  # before it joins, when it has, and when it has ended
