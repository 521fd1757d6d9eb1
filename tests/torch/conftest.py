"""What this torch cannot compile with communicating ops is skipped, with what the ops say of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path

import pytest
import torch

from mkernel.errors import Unsupported
from mkernel.ops.checkpointing import require_saving
from mkernel.ops.inductor import require_order

BENCH = Path(__file__).parents[2] / "bench"
COMPILES_BESIDE = torch.__version__ < (2, 7)
"""Whether Inductor leaves workers behind, which hold what ranks share."""
if COMPILES_BESIDE:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@cache
def refusals() -> list[str]:
    """What the ops say of this torch's compilers, where they refuse them."""
    return [said for said in map(_refusal, (require_order, require_saving)) if said]


def _refusal(require: Callable[[], None]) -> str:
    try:
        require()
    except Unsupported as error:
        return str(error)
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A refused test is a skipped one."""
    report = yield
    if report.failed and call.excinfo is not None:
        text = str(call.excinfo.value)
        for said in refusals():
            if said in text:
                report.outcome = "skipped"
                report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {said}")
    return report


@pytest.fixture
def bench_scripts(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the benchmarks' scripts, which tests and their ranks may import."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PYTHONPATH", f"{BENCH}:{Path(__file__).parent}")
    return BENCH
