"""all_gather_gemm on ``ascend`` over ``efa``, on a device that reorders and places bytes twice."""

from __future__ import annotations

import pytest
import torch
from in_world import relative, shards

import mkernel
from mkernel.cases.base import TOLERANCE
from mkernel.errors import WorldError

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

ROWS, K, N = 129, 520, 264
SOME_PARTS = "16384"
"""Bytes of a message: half of a whole tile, 128 rows by 64 float32; more than a tile at an edge."""
HELD_NS = "5000000"
"""A packet in four comes up to so much later: longer than a tile takes to compute."""


def calls(count: int) -> list[tuple[bool, float]]:
    """Of each call: whether the gathered rows are exact, and the product's relative error."""
    world = mkernel.world()
    assert world.nic is not None
    assert not world.nic.capabilities().ordered
    out = torch.empty(ROWS * world.size, N)
    found = []
    for seed in range(count):
        a, b = shards(seed, world.size, ROWS, K, N)
        out.fill_(float("nan"))
        _, whole = mkernel.all_gather_gemm(a[world.rank], b, out=out, return_gathered=True)
        exact = torch.equal(whole, torch.cat(a))
        found.append((exact, relative(out, torch.cat(a).double() @ b.double())))
    return found


@pytest.mark.parametrize(
    "message", ["1073741824", SOME_PARTS, "4096"], ids=["whole", "some-parts", "parts"]
)
def test_reordered_and_placed_twice(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole puts, and puts of many messages, which the receiver counts."""
    monkeypatch.setenv("MKERNEL_SOFTVERBS_SEED", "1")
    monkeypatch.setenv("MKERNEL_SOFTVERBS_DUPLICATES", "50")
    monkeypatch.setenv("MKERNEL_SOFTVERBS_HOLD_NS", HELD_NS)
    monkeypatch.setenv("MKERNEL_SOFTVERBS_MAX_MESSAGE", message)
    for found in mkernel.launch(
        calls, 8, nodes=2, ranks_per_node=2, nic="efa", accelerator="ascend"
    ):
        assert all(exact for exact, _ in found)
        assert max(error for _, error in found) <= TOLERANCE["float32"]


def test_a_miscounted_immediate_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal of a put of many messages is raised before the last of them: stale rows. The
    numbers of messages that came too late may also stop a later call for good."""
    monkeypatch.setenv("MKERNEL_SOFTVERBS_MAX_MESSAGE", SOME_PARTS)
    monkeypatch.setenv("MKERNEL_SOFTVERBS_HOLD_NS", HELD_NS)
    fault = "mkernel.conformance.nic_faults:MiscountedImmediate"
    try:
        results = mkernel.launch(
            calls, 10, nodes=2, ranks_per_node=1, nic=fault, timeout_s=10, accelerator="ascend"
        )
    except WorldError:
        return
    assert not all(
        exact and error <= TOLERANCE["float32"] for found in results for exact, error in found
    )
