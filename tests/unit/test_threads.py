"""A thread's start ends, also where the new thread dies before it says that it runs; and so does the
wait for its end."""

from __future__ import annotations

import gc
import re
import threading
import weakref

import pytest

from mkernel.backends.runtime import threads
from mkernel.backends.runtime.threads import Thread
from mkernel.errors import Timeout


def test_it_runs_its_target_with_its_arguments() -> None:
    told: list[object] = []
    thread = Thread(told.append, "word", name="mkernel-test")
    thread.start()
    thread.join(60)
    assert told == ["word"]
    assert thread.daemon
    assert thread.name == "mkernel-test"


def test_a_start_whose_thread_dies_first_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "START_S", 0.2)
    thread = Thread(print, name="mkernel-test")
    monkeypatch.setattr(thread, "_bootstrap", lambda: None)  # it dies as one without memory does
    raised: list[BaseException] = []

    def start() -> None:
        try:
            thread.start()
        except RuntimeError as error:
            raised.append(error)

    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(60)
    assert not starting.is_alive(), "start waits for ever"
    assert "thread mkernel-test did not begin within 0.2 s" in str(raised[0])
    assert not thread.is_alive()


class _Stopped(threading.Event):
    """The process is stopped in the first wait and goes on when its time has passed; then its other
    threads go on too."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        if self.goes_on.is_set():
            return super().wait(timeout)
        self.goes_on.set()
        return False


def test_a_thread_has_time_to_begin_when_its_process_was_stopped_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[object] = []
    thread = Thread(told.append, "word", name="mkernel-test")
    stopped = thread._begun = _Stopped()
    begin = thread._bootstrap  # type: ignore[attr-defined]
    monkeypatch.setattr(thread, "_bootstrap", lambda: stopped.goes_on.wait(60) and begin())
    thread.start()
    thread.join(60)
    assert told == ["word"]


def test_a_thread_that_begins_too_late_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "START_S", 0.0)
    told: list[object] = []
    late, over = threading.Event(), threading.Event()
    thread = Thread(told.append, "word", name="mkernel-test")
    begin = thread._bootstrap  # type: ignore[attr-defined]

    def wait_first() -> None:
        late.wait(60)
        begin()
        over.set()

    monkeypatch.setattr(thread, "_bootstrap", wait_first)
    with pytest.raises(RuntimeError, match="did not begin"):
        thread.start()
    late.set()
    assert over.wait(60)
    assert told == []


def test_a_thread_that_was_given_up_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python knows it for ever, as one that is about to begin."""

    class Store:
        def look(self) -> None:
            pass

    monkeypatch.setattr(threads, "START_S", 0.0)
    store = Store()
    gone = weakref.ref(store)
    thread = Thread(store.look, store, name="mkernel-test")
    monkeypatch.setattr(thread, "_bootstrap", lambda: None)
    with pytest.raises(RuntimeError, match="did not begin"):
        thread.start()
    assert thread in threading.enumerate()
    del store
    gc.collect()
    assert gone() is None


def test_threads_that_end_are_joined() -> None:
    over = threading.Event()
    told = [Thread(over.wait, 60, name=f"mkernel-test-{number}") for number in range(3)]
    for thread in told:
        thread.start()
    over.set()
    threads.end(told, "Nothing.")
    assert not any(thread.is_alive() for thread in told)


def test_a_thread_that_does_not_end_is_named_with_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "END_S", 0.1)
    over = threading.Event()
    stuck = Thread(_hold, over, name="mkernel-test-stuck")
    stuck.start()
    quick = Thread(print, name="mkernel-test-quick")
    quick.start()
    try:
        with pytest.raises(
            Timeout, match=r"thread mkernel-test-stuck did not end within 0\.1 s"
        ) as told:
            threads.end([quick, stuck], "It holds the door: close it.")
        place = (
            r"it is at threading\.py:\d+ in wait, .* called from test_threads\.py:\d+ in _hold\. It"
        )
        assert re.search(place, str(told.value)), told.value
        assert str(told.value).endswith(". It holds the door: close it.")
    finally:
        over.set()
        stuck.join(60)


def _hold(over: threading.Event) -> None:
    over.wait(60)
