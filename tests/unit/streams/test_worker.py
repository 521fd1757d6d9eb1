"""The thread that runs streams' calls."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from mkernel.backends.accelerators.streams import worker


class Launch:
    """A call that does nothing."""

    inference = False
    stuck = False

    def __init__(self, *_: Any) -> None:
        self._ran = threading.Event()

    def run(self, scratch: Any) -> None:
        self._ran.set()

    def ended(self, timeout_s: float) -> bool:
        return self._ran.wait(timeout_s)


class SlowToFree:
    """What the thread holds until it ends."""

    def __del__(self) -> None:
        time.sleep(0.2)


def test_a_stopped_worker_has_freed_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that a thread frees while the interpreter ends take the process down."""
    monkeypatch.setattr(worker, "StreamsLaunch", Launch)
    monkeypatch.setattr(worker, "Scratch", SlowToFree)
    made: Any = worker.Worker()
    made.start(None, None, None, None, None)
    assert made.idle(60)
    made.stop()
    assert "mkernel-streams" not in [thread.name for thread in threading.enumerate()]


def test_a_start_that_is_interrupted_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes when the thread runs and nothing refers to it yet; calls can go on."""
    monkeypatch.setattr(worker, "StreamsLaunch", Launch)
    begun: list[threading.Thread] = []

    class Interrupted(worker.Thread):
        def start(self) -> None:
            super().start()
            begun.append(self)
            if len(begun) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(worker, "Thread", Interrupted)
    made: Any = worker.Worker()
    with pytest.raises(KeyboardInterrupt):
        made.start(None, None, None, None, None)
    made.stop()
    begun[0].join(60)
    assert not begun[0].is_alive()
    made.start(None, None, None, None, None)
    assert made.idle(60)
    made.stop()


def test_a_worker_whose_launch_lasts_is_stopped_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "StreamsLaunch", Launch)
    goes_on = threading.Event()
    monkeypatch.setattr(Launch, "run", lambda self, scratch: goes_on.wait(600))
    made: Any = worker.Worker()
    made.start(None, None, None, None, None)
    began = time.monotonic()
    made.stop()
    assert time.monotonic() - began < 300
    goes_on.set()


_OUTLIVES = """
import threading, types
import torch
from mkernel.backends.accelerators.streams import StreamsAccelerator, worker
from mkernel.backends.accelerators.streams.call_streams import Broken
from mkernel.backends.transport import _transport
from mkernel.backends.runtime.host_memory import HostMemory

for timed_out in (True, False):
    memory = HostMemory.create(_transport.pad_bytes(8))
    _transport.pad_format(memory.address, 8)
    goes_on = threading.Event()

    def blocked_in_a_message(*_, goes_on=goes_on, timed_out=timed_out, **__):
        goes_on.wait(60)
        raise Broken(1, 0, timed_out=timed_out)

    worker.CallStreams = blocked_in_a_message
    backend = StreamsAccelerator()
    call = types.SimpleNamespace(
        plan=types.SimpleNamespace(op="gemm_all_reduce"), tensors={"a": torch.empty(1)},
        pad=memory.address, number=1, epoch=1, group=None,
    )
    launch = backend.launch(call)
    _transport.pad_abort(memory.address, _transport.AbortCode.peer_failure)
    assert launch.wait(5), "the world has ended the call"
    assert backend.close(5)
    memory.close()
    goes_on.set()
    assert launch.ended(30)
"""


def test_a_thread_that_outlives_its_world_leaves_its_memory_alone() -> None:
    """A message to a rank that is gone blocks it beyond the end of the world on a CPU, where the world
    does not wait for it."""
    done = subprocess.run(
        [sys.executable, "-c", _OUTLIVES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"


def test_a_process_without_a_thread_to_spare_can_still_end_its_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(worker, "StreamsLaunch", Launch)
    made: Any = worker.Worker()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="new thread"):
            made.start(None, None, None, None, None)
    made.stop()
    made.start(None, None, None, None, None)
    assert made.idle(60)
    made.stop()
