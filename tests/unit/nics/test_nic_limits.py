"""What a backend does where the device has no room left, or none at all."""

from __future__ import annotations

import subprocess
import sys

import pytest
from nic_ranks import local_ranks, opened

from mkernel.backends.nics.cx7 import Cx7Nic
from mkernel.backends.nics.efa import EfaNic
from mkernel.errors import BackendUnavailable


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
