"""Kernels of the experts' peers: right, and as fast as a copy of the bytes that they must move."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import pytest
import torch
from device_buffers import needs_gpus
from expert_rows import TOKENS, TOP_K, check

from mkernel.harness.contenders.experts import Sorted

pytestmark = needs_gpus(1)

HIDDEN, TOP, EXPERTS, MINE = 4096, 8, 128, 64
MOST_TO_COPY = 1.3
"""A sum's time over that of a copy of as many bytes."""


@pytest.mark.parametrize("columns", [40, 1024, 4096])
@pytest.mark.parametrize("capacity", [None, TOKENS * TOP_K])
def test_rows_are_copied_and_added_as_the_routing_says(columns: int, capacity: int | None) -> None:
    check("cuda", columns, capacity)


def microseconds(call: Callable[[], object]) -> float:
    """The median of a call's device time, the cache being flushed before each."""
    flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    found = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        torch.cuda._sleep(2_000_000)  # the host's launches are not timed
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * start.elapsed_time(end))
    return statistics.median(found[2:])


@pytest.mark.alone
@pytest.mark.parametrize("tokens", [8192, 32768])
def test_sums_and_copies_of_rows_run_at_the_rate_of_a_copy(tokens: int) -> None:
    """The rate holds also where the room for rows is twice what is used, as a capacity makes it."""
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP).indices
    weights = torch.rand(tokens, TOP, device="cuda")
    routing = Sorted(ids, MINE, tokens * TOP)
    rows = torch.randn(tokens * TOP, HIDDEN, device="cuda", dtype=torch.bfloat16)
    count = int(routing.count)
    assert 0.4 < count / len(rows) < 0.6
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    moved = {
        "sum": (
            lambda: routing.summed(rows, weights),
            (count + tokens) * HIDDEN * 2,  # a row in for each, a row out for each token
        ),
        # Each expert's rows run through all tokens, which no cache holds.
        "copy": (lambda: routing.copied(x), 2 * count * HIDDEN * 2),
    }
    for name, (call, nbytes) in moved.items():
        source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
        copy = microseconds(partial(torch.empty_like(source).copy_, source))  # reads and writes it
        found = microseconds(call)
        assert found <= MOST_TO_COPY * copy, (name, found, copy)
