"""What ran on GPUs, as a file: ``pytest tests/gpu --gpu-report bench/results/gpu_tests.json``."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import kept_ranks
import pytest
import torch
from gpu_shares import share, visible

from mkernel.harness import gpu_tests
from mkernel.harness.provenance import devices, provenance
from mkernel.settings import load

BEGAN = time.monotonic()
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
    group.addoption("--commit", help="of this tree, where there is no git to ask")


def pytest_configure(config: pytest.Config) -> None:
    """Before CUDA starts: nothing that this file imports may ask how many GPUs there are."""
    worker, each = (
        os.environ.get("PYTEST_XDIST_WORKER"),
        config.getoption("--gpus-per-worker", None),
    )
    if worker is not None and each is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(share(worker, visible(), each))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes more than a pair of GPUs, before ``-m`` chooses."""
    from device_buffers import gpus_of  # starts CUDA

    for item in items:
        needs = (
            gpus_of.get(mark.kwargs.get("reason", ""), 0) for mark in item.iter_markers("skipif")
        )
        if max(needs, default=0) > 2:
            item.add_marker("wide")


@pytest.fixture(autouse=True)
def _by_itself(request: pytest.FixtureRequest) -> None:
    """What wants the GPUs to itself finds no ranks there that are kept for others."""
    if request.node.get_closest_marker("alone") is not None:
        kept_ranks.close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    file = config.getoption("--gpu-report", None)
    if file is None or hasattr(config, "workerinput"):  # a worker of xdist tells its master
        return
    stats = config.pluginmanager.getplugin("terminalreporter").stats
    failures = [
        report.nodeid for outcome in ("failed", "error") for report in stats.get(outcome, ())
    ]
    found = provenance(config.rootpath, config.getoption("--commit"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found["hardware"] = {**found["hardware"], **devices(device)}
    chosen = [(flag, str(config.getoption(flag) or "")) for flag in ("-k", "-m")]
    gpu_tests.add(
        gpu_tests.TestRun(
            selection=(*map(str, config.args), *(part for one in chosen if one[1] for part in one)),
            ranks_per_device=load().ranks_per_device,
            counts={outcome: len(stats[outcome]) for outcome in OUTCOMES if outcome in stats},
            skips=dict(Counter(_reason(report) for report in stats.get("skipped", ()))),
            failures=tuple(dict.fromkeys(failures)),
            provenance=found,
            seconds=round(time.monotonic() - BEGAN, 1),
        ),
        file,
    )


def _reason(report: pytest.TestReport) -> str:
    """Why, without where."""
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(why).removeprefix("Skipped: ")
