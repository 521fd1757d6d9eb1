"""A world's symmetric memory: what a NIC registers of it, what plans are told of it, what is freed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from mkernel.world import board, memory, symmetric
from mkernel.world.identity import Identity
from mkernel.world.memory import Arena, PlanMemory, SymmetricHeap


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that buffers were registered with; the buffers are none."""
    given: list[Any] = []

    def allocate(region: int, nbytes: int, *, session: Any, **_: Any) -> Any:
        given.append(session)
        local = SimpleNamespace(address=4096 * (region + 1))
        return Mock(region=region, nbytes=nbytes, local=local, peers={1: local})

    monkeypatch.setattr(symmetric, "allocate", allocate)
    return given


def heap(nodes: int = 1) -> SymmetricHeap:
    return SymmetricHeap(Identity(0, nodes, 2), Mock(), Mock(), Mock(), itertools.count())


def test_a_nic_gets_what_it_reaches(sessions: list[Any]) -> None:
    """Where it does not reach the accelerator's memory it gets staging memory."""
    made, nic = heap(), Mock()
    assert sessions == [None], "the pad"
    made.session = nic
    made._arena_for([64])
    made._staging_for(64)
    assert sessions[1:] == [nic, nic]
    made.staged = True
    made._arena_for([1 << 20])
    made._staging_for(1 << 20)
    assert sessions[3:] == [None, nic]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("built", [False, True])
def test_ranks_of_one_node_have_boards(
    sessions: list[Any], nodes: int, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not built:
        monkeypatch.setattr(board, "native", lambda: None)
    elif board.native() is None:
        pytest.skip("native modules of an older build have none")
    assert (heap(nodes).board is not None) == (nodes == 1 and built)


def test_nics_read_and_write_the_staging_memory_where_there_is_some() -> None:
    arena = Arena([64])
    arena.buffer = Mock(region=3)
    staging: Any = Mock(region=5)
    assert PlanMemory(None, None, {}).region == 0
    assert PlanMemory(arena, None, {}).region == 3
    assert PlanMemory(arena, staging, {}).region == 5


@pytest.mark.parametrize("quiet", [False, True])
def test_memory_that_kernels_may_touch_is_kept_until_the_end(
    sessions: list[Any], quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(memory, "_kept_until_exit", kept)
    made = heap()
    pad: Any = made._pad
    made.close(quiet=quiet)
    assert (pad.close.call_count, len(kept)) == (quiet, not quiet)
