"""A thread's start ends, also where the new thread dies before it says that it runs."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from mkernel.backends.runtime import threads
from mkernel.backends.runtime.threads import Thread


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
