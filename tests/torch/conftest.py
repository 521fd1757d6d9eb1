"""Where Inductor keeps no order of ops, what needs it is skipped, with what the ops say of it."""

from __future__ import annotations

from collections.abc import Generator
from functools import cache

import pytest

from mkernel.errors import Unsupported
from mkernel.ops.inductor import require_order

_PARTITION = "Tried to erase Node"
"""What such a torch says of a checkpointed region with effects, before it lowers any."""


@cache
def refusal() -> str | None:
    """What the ops say of this torch's Inductor, if they refuse it."""
    try:
        require_order()
    except Unsupported as error:
        return str(error)
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A refused test is a skipped one."""
    report = yield
    said = refusal()
    if report.failed and said is not None and call.excinfo is not None:
        text = str(call.excinfo.value)
        if said in text or _PARTITION in text:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {said}")
    return report
