"""No byte between emulated nodes goes around the NIC.

The software device can scramble every payload byte that it carries. With that switched on, the
gathered A shows which bytes came through it: exactly those of other nodes' ranks, all of them.
"""

from __future__ import annotations

import pytest
import torch
from in_world import DEADLINE_S, arrivals

import mkernel
from mkernel.errors import Timeout

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

MASK = 0x5A
ROWS, K, N = 256, 1024, 64


def gathered_bytes() -> tuple[list[str], int, int]:
    """How each rank's rows arrived here, bytes that the NIC put, bytes expected."""
    world = mkernel.world()
    shards = [
        torch.randn(ROWS, K, generator=torch.Generator().manual_seed(rank)).half()
        for rank in range(world.size)
    ]
    b = torch.zeros(K, N, dtype=torch.float16)
    before = world.nic.statistics().put_bytes if world.nic else 0
    _, whole = mkernel.all_gather_gemm(shards[world.rank], b, return_gathered=True)
    assert world.nic is None or world.nic.flush(5)
    put = (world.nic.statistics().put_bytes if world.nic else 0) - before
    far = world.size - world.identity.ranks_per_node
    return arrivals(whole, shards, MASK), put, far * ROWS * K * 2


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 1), (2, 2), (3, 2)])
def test_every_byte_of_another_node_came_through_the_nic(
    nodes: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_SCRAMBLE", str(MASK))
    results = mkernel.launch(
        gathered_bytes, nodes=nodes, ranks_per_node=ranks, accelerator="ascend"
    )
    for rank, (arrived, put, expected) in enumerate(results):
        node = rank // ranks
        assert arrived == [
            "intact" if other // ranks == node else "scrambled" for other in range(nodes * ranks)
        ]
        assert put == expected


def test_dead_links_end_in_an_error_not_in_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_SOFTVERBS_FAULTS", "drop@1")
    with pytest.raises((mkernel.errors.NicError, Timeout)):
        mkernel.launch(
            gathered_bytes, nodes=2, ranks_per_node=1, timeout_s=DEADLINE_S, accelerator="ascend"
        )
