"""Figures of a link from times of messages, on a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mkernel import measure
from mkernel.measure import link_figures


def test_a_direction_takes_half_of_a_round_trip() -> None:
    found = link_figures([10e-6, 8e-6, 300e-6], nbytes=1_000_000, answered_s=105e-6)
    assert found.latency_us == pytest.approx(5.0)
    assert found.gbs == pytest.approx(10.0)


def test_what_an_end_times_is_a_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait of rank 0 takes 40 us on the test's clock, every copy 160 us, nothing else any."""
    now = [0.0]

    def wait(*_: object) -> object:
        now[0] += 40e-6
        return measure._transport.WaitResult.ok

    def copy() -> None:
        now[0] += 160e-6

    ok = measure._transport.WaitResult
    monkeypatch.setattr(measure, "_transport", SimpleNamespace(pad_wait=wait, WaitResult=ok))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    end = SimpleNamespace(rank=0, exchange=lambda: None)
    found = measure._figures(end, 0, lambda: None, lambda: None, copy, 1 << 20, 10)  # type: ignore[arg-type]
    assert found.latency_us == pytest.approx(20.0)
    assert found.gbs == pytest.approx(10 * (1 << 20) / (1600e-6 + 20e-6) / 1e9)
