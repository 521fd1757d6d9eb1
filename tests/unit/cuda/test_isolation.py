"""Doctor names the modes in which GPUs do not reach each other's memory, and what to use instead."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mkernel import doctor


def driver(*, split: int = 0, confidential: int = 0) -> Any:
    """Stand for ``pynvml`` on a host of four GPUs, of which the first ``split`` are in MIG mode."""
    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMigMode=lambda handle: [int(handle < split), 0],
        nvmlSystemGetConfComputeState=lambda: SimpleNamespace(ccFeature=confidential),
    )


def rows(monkeypatch: pytest.MonkeyPatch, library: Any) -> dict[str, doctor.Row]:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return {row.name: row for row in doctor.accelerator_rows()}


def test_mig_is_named_with_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows(monkeypatch, driver(split=2))
    row = found["hopper: MIG"]
    assert not row.usable
    assert "on for GPU 0,1" in row.detail
    assert "nvidia-smi -i 0,1 -mig 0" in row.remedy
    assert "accelerator streams with MKERNEL_STREAMS_COPIES=0" in row.remedy
    assert "hopper: confidential computing" not in found


def test_confidential_computing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows(monkeypatch, driver(confidential=1))
    row = found["hopper: confidential computing"]
    assert not row.usable
    assert "accelerator streams with MKERNEL_STREAMS_COPIES=0" in row.remedy
    assert "hopper: MIG" not in found


def test_without_such_a_mode_or_a_driver_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (driver(), None):  # None: it cannot be imported
        assert not any(name.startswith("hopper:") for name in rows(monkeypatch, library))
