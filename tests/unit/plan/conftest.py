"""Plans do not depend on who runs the tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the settings that plans depend on."""
    for name in ("ACCELERATOR", "NIC", "VERBS", "PATH", "CONSTANTS"):
        monkeypatch.delenv(f"MKERNEL_{name}", raising=False)
