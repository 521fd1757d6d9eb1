"""What ran on GPUs, as a file: ``pytest tests/gpu --gpu-report bench/results/gpu_tests.json``."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from mkernel.harness import gpu_tests
from mkernel.harness.provenance import devices, provenance
from mkernel.settings import load


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mkernel")
    group.addoption(
        "--gpu-report", type=Path, metavar="FILE", help="add counts and skips of this run to FILE"
    )
    group.addoption("--commit", help="of this tree, where there is no git to ask")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--gpu-report", None)
    if file is not None and not hasattr(
        config, "workerinput"
    ):  # a worker of xdist tells its master
        config.pluginmanager.register(Reporter(config, file))


class Reporter:
    """Counts the outcomes of a session, and writes them at its end."""

    def __init__(self, config: pytest.Config, file: Path) -> None:
        self._config, self._file = config, file
        self._began = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._skips: Counter[str] = Counter()
        self._failures: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test is what its call was; without one, or where its setup or end failed, what that was."""
        if hasattr(report, "wasxfail") and report.when == "call":
            self._counts["xpassed" if report.passed else "xfailed"] += 1
        elif report.skipped:
            self._counts["skipped"] += 1
            self._skips[_reason(report)] += 1
        elif report.failed:
            self._counts["failed" if report.when == "call" else "error"] += 1
            self._failures[report.nodeid] = None
        elif report.when == "call":
            self._counts["passed"] += 1

    def pytest_sessionfinish(self) -> None:
        config = self._config
        root = config.rootpath
        found = provenance(root, config.getoption("--commit"))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        found["hardware"] = {**found["hardware"], **devices(device)}
        keyword = str(config.getoption("-k") or "")
        gpu_tests.add(
            gpu_tests.TestRun(
                selection=(*map(str, config.args), *(["-k", keyword] if keyword else [])),
                ranks_per_device=load().ranks_per_device,
                counts=dict(self._counts),
                skips=dict(self._skips),
                failures=tuple(self._failures),
                provenance=found,
                seconds=round(time.monotonic() - self._began, 1),
            ),
            self._file,
        )


def _reason(report: pytest.TestReport) -> str:
    """Why, without where."""
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(why).removeprefix("Skipped: ")
