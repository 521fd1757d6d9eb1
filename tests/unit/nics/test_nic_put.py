"""Put-with-signal: when the signal is seen, every byte is there."""

from __future__ import annotations

import pytest
from nic_ranks import local_ranks

from mkernel.errors import ArgumentError


@pytest.mark.parametrize("limit", [1, 100, 4096])
def test_large_puts_are_cut_into_messages(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_MAX_MESSAGE", str(limit))
    with local_ranks(queue_depth=8) as (a, b):
        assert a.session.capabilities().max_message_bytes == limit
        sent = a.fill(20 * limit + 3 * (limit > 1))
        a.session.put(1, 0, 0, 77, len(sent), 1, 1)
        assert b.waits(1, 1)
        assert b.read(len(sent), 77) == sent
        assert b.count(1) == 1


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("signal", (1, 0, 0, 0, 8, 1 << 23, 1)),
        ("signal", (1, 0, 0, 0, 8, -1, 1)),
        ("value", (1, 0, 0, 0, 8, 0, 1 << 23)),
        ("value", (1, 0, 0, 0, 8, 0, -1)),
        ("local", (1, 0, -1, 0, 8, 0, 1)),
        ("nbytes", (1, 0, 0, 0, 1 << 63, 0, 1)),
    ],
)
def test_illegal_arguments_are_named(argument: str, values: tuple[int, ...]) -> None:
    with local_ranks() as (a, _):
        with pytest.raises(ArgumentError) as caught:
            a.session.put(*values)
        assert caught.value.argument == argument
        assert a.session.failure() is None
