"""Settings that are out of range are refused by their variables' names."""

from __future__ import annotations

import json

import pytest

from mkernel.errors import ArgumentError
from mkernel.settings import check_timeout, load


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(("MKERNEL_TIMEOUT_S", value) for value in ("nan", "inf", "1e308", "1e-9", "0", "-1")),
        *(("MKERNEL_HEARTBEAT_S", value) for value in ("nan", "inf", "1e308", "1e-9")),
        ("MKERNEL_SIGNALS", "1" + "0" * 30),
        ("MKERNEL_NODES", "1000000"),
        ("MKERNEL_RANKS_PER_DEVICE", "1000000000"),
        ("MKERNEL_NIC_SETTINGS__FIFO_SLOTS", "1" + "0" * 18),
        ("MKERNEL_NIC_SETTINGS__QUEUE_DEPTH", "1e9"),
        ("MKERNEL_NIC_SETTINGS__STRIPE_BYTES", "9" * 30),
        ("MKERNEL_NIC_SETTINGS", "[" * 100_000),
        ("MKERNEL_PINNING", "{"),
        ("MKERNEL_PINNING", "[" * 100_000),
        ("MKERNEL_PINNING", json.dumps({"accelerators": ["a" * 100_000]})),
        ("MKERNEL_PINNING", json.dumps({"accelerators": [0] * 40_000})),
    ],
    ids=lambda value: value[:40],
)
def test_settings_out_of_range_are_refused(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ArgumentError, match=variable) as error:
        load()
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 0.0, 1e-9, 604801.0])
def test_a_deadline_is_finite_and_sane(seconds: float) -> None:
    with pytest.raises(ArgumentError, match="--timeout"):
        check_timeout("--timeout", seconds)
    for sane in (0.01, 30.0, 604800.0):
        check_timeout("--timeout", sane)
