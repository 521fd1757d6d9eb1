"""The published table beside the model: ten seconds of a core, once for all tests of a session."""

from __future__ import annotations

import pytest
from once import once

from mkernel.backends.accelerators.ascend.machine import load_machine
from mkernel.harness import modelled


def published_table(request: pytest.FixtureRequest) -> modelled.ComparisonReport:
    """The table, by the machine model that ships."""
    return once(request, lambda: modelled.compare(load_machine()), "published-table")
