"""Ranks of a host whose devices do not reach each other's memory are nodes of their own: those of the
stand-in ``Apart`` run the simulator's kernels, and only the NIC joins its two pairs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from command_line import mkernel as command
from in_world import TOLD_S, stores
from torch import distributed

import mkernel
from mkernel.cases.base import TOLERANCE
from mkernel.errors import Unsupported
from mkernel.launch import host_store

BACKEND = "limited_backends:Apart"
LIMIT = TOLERANCE["float32"]

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]


class Found(NamedTuple):
    """A world: nodes, ranks of each, verbs, kinds of ways between ranks, the error of a call."""

    nodes: int
    each: int
    verbs: str | None
    ways: list[str]
    error: float


def found() -> Found:
    world = mkernel.world()
    shards = [
        torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
        for rank in range(world.size)
    ]
    b = torch.randn(64, 48, generator=torch.Generator().manual_seed(99))
    got = mkernel.all_gather_gemm(shards[world.rank], b)
    wanted = torch.cat(shards).double() @ b.double()
    error = float((got - wanted).norm() / wanted.norm())
    ways = sorted({one.kind for one in world.map.links.table.classes})
    where = world.identity
    return Found(where.nodes, where.ranks_per_node, world.backends.verbs, ways, error)


def of_job(port: int, **options: Any) -> Found:
    """The world of a program that torchrun has started."""
    mkernel.finalize()
    mkernel.init(accelerator=BACKEND, stores=stores(port), timeout_s=TOLD_S, **options)
    return found()


def of_group(folder: str, members: list[int]) -> Found | None:
    """The world of some ranks of a program that is in torch.distributed."""
    mkernel.finalize()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/torch",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    group, told = distributed.new_group(members), None
    if distributed.get_rank() in members:
        mkernel.init(group, accelerator=BACKEND, timeout_s=TOLD_S)
        told = found()
        mkernel.finalize()
    distributed.barrier()
    distributed.destroy_process_group()
    return told


def launched(part: Any, *arguments: Any) -> list[Any]:
    ranks: list[Any] = mkernel.launch(
        part, *arguments, ranks_per_node=4, accelerator="ascend", timeout_s=TOLD_S
    )
    return ranks


@pytest.fixture
def port() -> Iterator[int]:
    """Of a store for the job's ranks."""
    store, at = host_store(4, TOLD_S)
    yield at
    del store


def test_pairs_that_reach_each_other_are_nodes(port: int) -> None:
    for told in launched(of_job, port):
        assert told[:4] == (2, 2, "soft", ["nic", "p2p"])
        assert told.error <= LIMIT


def test_launched_ranks_are_split_too() -> None:
    for told in mkernel.launch(found, ranks_per_node=4, accelerator=BACKEND, timeout_s=TOLD_S):
        assert told[:4] == (2, 2, "soft", ["nic", "p2p"])
        assert told.error <= LIMIT


@pytest.mark.parametrize(
    ("members", "world"),
    [
        ([0, 1, 2, 3], (2, 2, "soft", ["nic", "p2p"])),
        ([1, 2], (2, 1, "soft", ["nic"])),
        ([2, 3], (1, 2, None, ["p2p"])),
    ],
)
def test_a_group_is_split_as_its_job_would_be(
    members: list[int], world: tuple[Any, ...], tmp_path: Path
) -> None:
    for rank, told in enumerate(launched(of_group, str(tmp_path), members)):
        assert (told is not None) == (rank in members)
        if told is not None:
            assert told[:4] == world
            assert told.error <= LIMIT


def refused(port: int) -> str:
    with pytest.raises(Unsupported) as caught:
        of_job(port, nodes=1)
    return str(caught.value)


def test_one_node_by_name_is_refused_with_what_to_do(port: int) -> None:
    for message in launched(refused, port):
        assert "chip0 of node 0 does not reach the memory of chip2 of node 0" in message
        assert "the number of nodes is left open" in message


def test_commands_make_such_worlds() -> None:
    sizes = ["--m", "64", "--n", "32", "--k", "32"]
    planned = command("plan", "ag_gemm", "--accelerator", BACKEND, *sizes, "--json")
    assert planned.returncode == 0, planned.stderr
    report = json.loads(planned.stdout)
    plan = report["plan"]
    assert (plan["nodes"], plan["ranks_per_node"], plan["verbs"]) == (2, 2, "soft")
    assert "ranks that do not reach each other's memory are nodes of their own" in report["notes"]
    ran = command("run", "ag_gemm", "--accelerator", BACKEND, "--iterations", "1", *sizes)
    assert ran.returncode == 0, ran.stderr
    assert "2 nodes x 2 ranks" in " ".join(ran.stdout.split())
