"""The NIC half of the kit: ``cx7`` and ``efa`` pass it. What fails it is in test_nic_faults."""

from __future__ import annotations

import os
import signal
import time

import pytest

from mkernel.conformance.check import run_check
from mkernel.conformance.nic import NicSubject, nic_checks
from mkernel.harness.nic_ranks import Rank
from mkernel.harness.outcome import HarnessError

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

CHECKS = {check.name: check for check in nic_checks()}


@pytest.mark.parametrize("name", CHECKS)
def test_cx7_keeps_its_promises(name: str) -> None:
    result = run_check(CHECKS[name], NicSubject("cx7", "soft", quick=True))
    assert result.outcome == "passed", result.message


@pytest.mark.parametrize("name", CHECKS)
def test_efa_keeps_its_promises(name: str) -> None:
    """On a device that reorders and places bytes twice; order is not among its promises."""
    result = run_check(CHECKS[name], NicSubject("efa", "soft", quick=True))
    assert result.outcome == ("skipped" if name == "order" else "passed"), result.message


def leaves_without_a_word(me: Rank) -> None:
    os._exit(3)


def test_a_rank_that_does_not_run_says_nothing_of_the_backend() -> None:
    with pytest.raises(HarnessError, match=r"rank \d did not run: code 3"):
        NicSubject("cx7").run(leaves_without_a_word, 2)


def killed_while_it_sends(me: Rank) -> bool:
    """Rank 0 is killed; rank 1, which only receives, sees no error of its own."""
    with me.open(1 << 20) as port:
        if me.rank == 0:
            for _ in range(50):
                port.session.put(1, 0, 0, 0, 500_000, 0, 1)
            port.flush()
            for _ in range(200):
                port.session.put(1, 0, 0, 0, 500_000, 0, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        port.wait(0, 50, "puts of a rank that is killed")
        time.sleep(1.0)
        return port.session.failure() is None


def test_a_killed_sender_is_silence() -> None:
    assert NicSubject("cx7").run(killed_while_it_sends, 2, dies=(0,)) == [None, True]
