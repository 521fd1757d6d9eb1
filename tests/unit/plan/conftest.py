"""Plans are made for machines elsewhere, whatever this build has kernels for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from mkernel.backends.accelerators import hopper
from mkernel.backends.accelerators.hopper.native import native
from mkernel.errors import BackendUnavailable


@pytest.fixture(autouse=True)
def hopper_is_built(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A build without Hopper's kernels (``MKERNEL_HOPPER=OFF``) plans as one that has them."""
    try:
        native()
    except BackendUnavailable:
        stand_in = SimpleNamespace(
            all_gather_gemm=None, gemm_reduce=None, versions=lambda: (0, 12050)
        )
        monkeypatch.setattr(hopper, "_hopper", stand_in, raising=False)
        yield
        native.cache_clear()
    else:
        yield


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans do not depend on who runs the tests."""
    for name in ("ACCELERATOR", "NIC", "VERBS", "PATH", "CONSTANTS"):
        monkeypatch.delenv(f"MKERNEL_{name}", raising=False)
