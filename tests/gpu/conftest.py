"""What ran on GPUs, as a file: ``pytest tests/gpu --gpu-report bench/results/gpu_tests.json``."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import kept_ranks
import pytest
import torch
from gpu_shares import share, visible

from mkernel.harness import gpu_tests
from mkernel.harness.provenance import devices, provenance
from mkernel.settings import load

BEGAN = time.monotonic()
OFTEN_S = 5.0
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mkernel")
    group.addoption(
        "--gpu-report", type=Path, metavar="FILE", help="add counts and skips of this run to FILE"
    )
    group.addoption(
        "--gpus-per-worker",
        type=int,
        metavar="N",
        help="workers of xdist share the GPUs in groups of N; what needs more is skipped",
    )
    group.addoption(
        "--rest",
        action="store_true",
        help="go on where a run with the same --gpu-report and commit was stopped",
    )
    group.addoption("--commit", help="of this tree, where there is no git to ask")


def pytest_configure(config: pytest.Config) -> None:
    """Before CUDA starts: nothing that this file imports may ask how many GPUs there are."""
    worker, each = (
        os.environ.get("PYTEST_XDIST_WORKER"),
        config.getoption("--gpus-per-worker", None),
    )
    if worker is not None and each is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(share(worker, visible(), each))
    file = config.getoption("--gpu-report", None)
    if file is not None and not hasattr(config, "workerinput"):  # such a worker tells its master
        config.pluginmanager.register(Report(config, file))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what takes more than a pair of GPUs, before ``-m`` chooses; leave out what has run."""
    from device_buffers import gpus_of  # starts CUDA

    ran = ran_before(config)
    config.hook.pytest_deselected(items=[each for each in items if each.nodeid in ran])
    items[:] = [each for each in items if each.nodeid not in ran]

    for item in items:
        needs = (
            gpus_of.get(mark.kwargs.get("reason", ""), 0) for mark in item.iter_markers("skipif")
        )
        if max(needs, default=0) > 2:
            item.add_marker("wide")


@pytest.fixture(autouse=True)
def _by_itself(request: pytest.FixtureRequest) -> None:
    """What wants the GPUs to itself finds no ranks there that are kept for others, unless idle ones do
    not matter to it (``keeps_ranks``)."""
    alone = request.node.get_closest_marker("alone")
    if alone is not None and not alone.kwargs.get("keeps_ranks", False):
        kept_ranks.close()


def _list_of_ran(config: pytest.Config) -> Path:
    return Path(config.rootpath, config.getoption("--gpu-report")).with_suffix(".ran.txt")


def ran_before(config: pytest.Config) -> set[str]:
    """Return the tests that runs of this commit have run already, whatever their outcome."""
    if not config.getoption("--rest", False):
        return set()
    if config.getoption("--gpu-report") is None or config.getoption("--commit") is None:
        raise pytest.UsageError("--rest: name the report and the commit, --gpu-report and --commit")
    file = _list_of_ran(config)
    commit, *ran = file.read_text().splitlines() if file.exists() else [""]
    return set(ran) if commit == config.getoption("--commit") else set()


class Report:
    """The file, written again and again: what ends the run by force leaves what is known by then."""

    def __init__(self, config: pytest.Config, file: Path) -> None:
        self._config, self._file = config, file
        self._provenance: dict[str, Any] = {}
        self._written: float | None = None
        self._earlier: tuple[gpu_tests.TestRun, ...] = ()

    def pytest_sessionstart(self) -> None:
        """Asks the devices, before any test looks at what their memory holds."""
        if ran_before(self._config):
            recorded = gpu_tests.read(self._file)
            self._earlier = () if recorded is None else recorded.runs
        else:
            _list_of_ran(self._config).write_text(f"{self._config.getoption('--commit')}\n")
        found = provenance(self._config.rootpath, self._config.getoption("--commit"))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        found["hardware"] = {**found["hardware"], **devices(device)}
        self._provenance = found

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Behind the terminal's, which counts, and which shows failures only where a run ends."""
        if report.failed:
            with self._file.with_suffix(".failures.txt").open("a") as file:
                file.write(f"{report.nodeid}\n{report.longreprtext}\n{report.capstdout}\n")
        if report.when == "teardown":
            with _list_of_ran(self._config).open("a") as file:
                file.write(f"{report.nodeid}\n")
        late = self._written is None or time.monotonic() - self._written >= OFTEN_S
        if late or report.failed:
            self._write(cut_off=True)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """An interrupt and ``--maxfail`` leave tests that have not run."""
        ended = exitstatus not in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
        self._write(cut_off=not ended or bool(session.shouldfail or session.shouldstop))

    def _write(self, cut_off: bool) -> None:
        config = self._config
        stats = config.pluginmanager.getplugin("terminalreporter").stats
        failures = [
            report.nodeid for outcome in ("failed", "error") for report in stats.get(outcome, ())
        ]
        chosen = [(flag, str(config.getoption(flag) or "")) for flag in ("-k", "-m")]
        gpu_tests.add(
            gpu_tests.TestRun(
                selection=(
                    *map(str, config.args),
                    *(part for one in chosen if one[1] for part in one),
                ),
                ranks_per_device=load().ranks_per_device,
                counts={outcome: len(stats[outcome]) for outcome in OUTCOMES if outcome in stats},
                skips=dict(Counter(_reason(report) for report in stats.get("skipped", ()))),
                failures=tuple(dict.fromkeys(failures)),
                provenance=self._provenance,
                seconds=round(time.monotonic() - BEGAN, 1),
                cut_off=cut_off,
            ).after(self._earlier),
            self._file,
        )
        self._written = time.monotonic()


def _reason(report: pytest.TestReport) -> str:
    """Why, without where."""
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(why).removeprefix("Skipped: ")
