"""Variables of the environment: what is misspelt or out of range is named, others are let pass."""

from __future__ import annotations

import json
import warnings

import pytest

from mkernel import settings
from mkernel.backends.accelerators.ascend.settings import AscendSettings
from mkernel.errors import ArgumentError


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("MKERNEL_TIMEOUT", "MKERNEL_TIMEOUT_S"),
        ("MKERNEL_ACCELLERATOR", "MKERNEL_ACCELERATOR"),
        ("mkernel_verb", "MKERNEL_VERBS"),
        ("MKERNEL_NIC_SETTINGS__QPZ", "MKERNEL_NIC_SETTINGS__QPS"),
        ("MKERNEL_PINNING__NIC", "MKERNEL_PINNING__NICS"),
    ],
)
def test_a_misspelt_setting_is_refused_by_name(
    given: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(given, "hunter2")
    with pytest.raises(ArgumentError) as caught:
        settings.load()
    assert caught.value.argument == given
    assert caught.value.legal == meant
    assert "hunter2" not in str(caught.value)  # it may be a misspelt secret


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("MKERNEL_ASCEND_STRIKT", "MKERNEL_ASCEND_STRICT"),
        ("mkernel_ascend_sed", "MKERNEL_ASCEND_SEED"),
    ],
)
def test_a_misspelt_setting_of_a_backend_is_refused_where_it_is_used(
    given: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(given, "1")
    settings.load()
    with pytest.raises(ArgumentError) as caught:
        settings.load_as(AscendSettings)
    assert (caught.value.argument, caught.value.legal) == (given, meant)


def test_an_illegal_setting_of_a_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_ASCEND_SEED", "-1")
    with pytest.raises(ArgumentError, match="MKERNEL_ASCEND_SEED = '-1'"):
        settings.load_as(AscendSettings)


def test_a_variable_of_another_program_is_named_and_let_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MKERNEL_PLUGIN_CACHE", "/tmp")
    with pytest.warns(UserWarning, match="MKERNEL_PLUGIN_CACHE is set, but mkernel has no such"):
        settings.load()


def test_what_is_known_passes_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MKERNEL_TIMEOUT_S": "5",
        "mkernel_nic_settings__qps": "2",
        "MKERNEL_PINNING": "{}",
        "MKERNEL_SOFTVERBS_SEED": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = settings.load()
    assert (found.timeout_s, found.nic_settings.qps) == (5.0, 2)


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(("MKERNEL_TIMEOUT_S", value) for value in ("nan", "inf", "1e308", "1e-9", "0", "-1")),
        *(("MKERNEL_HEARTBEAT_S", value) for value in ("nan", "inf", "1e308", "1e-9")),
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
        settings.load()
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 0.0, 1e-9, 604801.0])
def test_a_deadline_is_finite_and_sane(seconds: float) -> None:
    with pytest.raises(ArgumentError, match="--timeout"):
        settings.check_timeout("--timeout", seconds)
    for sane in (0.01, 30.0, 604800.0):
        settings.check_timeout("--timeout", sane)


def test_settings_are_read_anew_when_a_variable_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_ASCEND_SEED", "3")
    found = settings.load_as(AscendSettings)
    assert settings.load_as(AscendSettings) is found
    for name, value, seed in (
        ("MKERNEL_ASCEND_SEED", "4", 4),
        ("MKERNEL_ASCEND_SEED", "3", 3),
        ("MKERNEL_ASCEND_SEED", None, None),
        ("mkernel_ascend_seed", "5", 5),
    ):
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
        assert settings.load_as(AscendSettings).seed == seed
