"""Every planted fault of NICs fails its check; what the faults are wrapped in does not."""

from __future__ import annotations

import threading
from multiprocessing.util import Finalize
from pathlib import Path

import pytest

from mkernel.conformance.check import run_check
from mkernel.conformance.nic import NicSubject, nic_checks
from mkernel.conformance.nic_faults import FAULTS, HONEST
from mkernel.harness.nic_ranks import Port, Rank

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

CHECKS = {check.name: check for check in nic_checks()}
PLANTED = [
    (fault, name) for faults in FAULTS.values() for fault, names in faults.items() for name in names
]


@pytest.mark.parametrize(
    ("fault", "name"), PLANTED, ids=[f"{f.partition(':')[2]}-{n}" for f, n in PLANTED]
)
def test_a_planted_fault_fails_its_check(fault: str, name: str) -> None:
    result = run_check(CHECKS[name], NicSubject(fault, "soft", quick=True, timeout_s=2.0))
    assert result.outcome == "failed"
    assert result.message
    assert not result.raised, result.message
    assert "Traceback" not in result.message, result.message  # the fault itself crashed


def test_every_check_has_a_planted_fault() -> None:
    assert {name for _, name in PLANTED} == set(CHECKS)


@pytest.mark.parametrize(
    ("wrapper", "name"), [(row.name, name) for row in HONEST for name in row.checks]
)
def test_the_honest_wrappers_of_the_faults_pass(wrapper: str, name: str) -> None:
    """The faults fail because of what they break, not because of what they are wrapped in."""
    honest = f"mkernel.conformance.nic_faults:{wrapper}"
    result = run_check(CHECKS[name], NicSubject(honest, "soft", quick=True))
    assert result.outcome == "passed", result.message


PORTS: list[Port] = []
"""Their memory must stay while a session that is closed goes on putting."""


def closes_later(me: Rank, report: Path) -> None:
    with me.open(4096) as port:
        PORTS.append(port)
        port.session.put(1 - me.rank, 0, 0, 0, 8, 0, 1)
        port.wait(0, 1, "the first put")
        me.exchange()
        port.session.close()
        assert "close-later" in running()
        me.exchange()
        Finalize(
            None, lambda: report.with_suffix(f".{me.rank}").write_text(running()), exitpriority=0
        )


def running() -> str:
    """Names of this process's threads."""
    return " ".join(thread.name for thread in threading.enumerate())


def test_what_goes_on_after_close_ends_with_its_process(tmp_path: Path) -> None:
    fault = NicSubject("mkernel.conformance.nic_faults:CloseLater", "soft", start="fork")
    fault.run(closes_later, 2, tmp_path / "threads")
    told = [path.read_text() for path in tmp_path.iterdir()]
    assert len(told) == 2
    assert not any("close-later" in names for names in told)
