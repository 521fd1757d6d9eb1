"""What a backend does where the device has no room left, or none at all."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from nic_ranks import DEADLINE_S, local_ranks, opened

from mkernel.backends.nics.cx7 import Cx7Nic
from mkernel.backends.nics.efa import EfaNic
from mkernel.errors import BackendUnavailable


def test_a_full_provider_queue_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """``wr_complete`` says ENOMEM and rolls its batch back: nothing is lost, nothing goes twice.

    The device holds one batch of the backend, which believes in 512 requests, so that each of ten
    batches takes a way there and back.
    """
    monkeypatch.setenv("MKERNEL_SOFTVERBS_SRD_QUEUE", "33")
    monkeypatch.setenv("MKERNEL_SOFTVERBS_LATENCY_NS", "5000000")
    with local_ranks(backend=EfaNic(), queue_depth=512) as (a, b):
        sent = a.fill(320 * 64)
        start = time.monotonic()
        for i in range(320):
            a.session.put(1, 0, 64 * i, 64 * i, 64, i % 3, 1)
        assert [b.waits(i, n) for i, n in enumerate((107, 107, 106))] == [True] * 3
        assert time.monotonic() - start > 0.045
        assert b.read(len(sent)) == sent
        assert a.session.flush(DEADLINE_S)
        assert [b.count(i) for i in range(3)] == [107, 107, 106]
        assert a.session.failure() is None


@pytest.mark.parametrize("backend", [Cx7Nic(), EfaNic()], ids=["cx7", "efa"])
def test_a_registration_that_fails_says_why(backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The region can be registered afterwards, as if nothing had been."""
    # After the session's own, for its receives, and region 0.
    monkeypatch.setenv("MKERNEL_SOFTVERBS_FAULTS", "registration@2")
    with local_ranks(backend=backend) as (a, b):
        monkeypatch.delenv("MKERNEL_SOFTVERBS_FAULTS")
        with pytest.raises(Exception, match=r"region 1 .*Cannot allocate memory.*ulimit -l"):
            a.session.register(1, a.memory.address, 4096)
        b.session.bind(1, 0, a.session.register(1, a.memory.address, 4096))
        a.session.put(1, 0, 0, 0, 8, 0, 1)
        assert b.waits(0, 1)


@pytest.mark.parametrize("backend", [Cx7Nic(), EfaNic()], ids=["cx7", "efa"])
def test_a_device_set_up_wrongly_does_not_open(
    backend, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_FAULTS", "explode@3")
    with pytest.raises(BackendUnavailable, match="Invalid argument"):
        opened(backend)
    assert "MKERNEL_SOFTVERBS_FAULTS='explode@3' is not" in capfd.readouterr().err


def test_a_device_that_does_not_open_is_told_from_none() -> None:
    """A process that is out of file descriptors has devices all the same."""
    code = """
import os, resource
from mkernel.backends.nics.provider import provider_status

assert provider_status("soft").usable
used = max(map(int, os.listdir("/proc/self/fd")))
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (used, most))
status = provider_status("soft")
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
assert not status.usable
print(status.detail, "|", status.remedy)
assert provider_status("soft").usable
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert "does not open: Too many open files" in done.stdout
    assert "ulimit" in done.stdout
