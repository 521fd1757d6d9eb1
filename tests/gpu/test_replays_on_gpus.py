"""Replays of CUDA graphs that have no peer, or are not ordered; tangents and stopped ranks on GPUs."""

from __future__ import annotations

from pathlib import Path

import kept_ranks
import pytest
import replay_ranks
from device_buffers import takes_ranks
from in_world import DEADLINE_S

import mkernel
from mkernel.launch import host_store

pytestmark = [takes_ranks(2), pytest.mark.usefixtures("leaves_nothing")]


@pytest.mark.parametrize(
    ("op", "how"),
    [
        ("all_reduce", "synchronize"),
        ("all_reduce", "finalize"),
        ("all_reduce", "next call"),
        ("all_gather_gemm", "synchronize"),
        ("gemm_reduce_scatter", "synchronize"),
    ],
)
def test_a_replay_without_its_peer_is_an_error_and_the_next_world_works(op: str, how: str) -> None:
    store, port = host_store(2, DEADLINE_S)
    found = mkernel.launch(
        replay_ranks.replays_once_more, op, how, port,
        ranks_per_node=2, accelerator="hopper", timeout_s=DEADLINE_S,
    )  # fmt: skip
    assert found == ["", ""]
    del store


@pytest.mark.parametrize("beside", ["graph", "eager"])
def test_replays_that_nothing_orders_are_right_or_an_error(beside: str) -> None:
    found = mkernel.launch(
        replay_ranks.replays_at_once, beside, 40,
        ranks_per_node=2, accelerator="hopper", timeout_s=20.0,
    )  # fmt: skip
    assert not [each for rank in found for each in rank if "wrong" in each]


def test_a_tangent_is_refused() -> None:
    assert kept_ranks.run(
        replay_ranks.tangents, ranks_per_node=2, accelerator="hopper"
    ) == [[], []]  # fmt: skip


def test_a_rank_that_was_stopped_starts_no_call_of_a_world_that_was_given_up(
    tmp_path: Path,
) -> None:
    found = mkernel.launch(
        replay_ranks.starts_late, tmp_path,
        ranks_per_node=2, accelerator="hopper", timeout_s=DEADLINE_S,
    )  # fmt: skip
    assert found == ["", ""]
