"""AllReduces without ``out``: ranks put their sums into each other's outputs, wherever these lie."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import kept_ranks
import output_ranks
import pytest
from device_buffers import takes_ranks
from hopper_ranks import Shape
from in_world import TOLD_S

import mkernel

SHAPES = [
    Shape("gemm_all_reduce", 4096, 4096, 512),
    Shape("gemm_all_reduce", 3000, 4104, 640, layout="column"),
    Shape("gemm_all_reduce", 8192, 2048, 1024, dtype="float16"),
]
several = pytest.mark.parametrize("world", [pytest.param(n, marks=takes_ranks(n)) for n in (2, 4)])
paths = pytest.mark.parametrize("path", ["fused", "library"])


@pytest.fixture(autouse=True)
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = getattr(request.node, "callspec", None)
    monkeypatch.setenv("MKERNEL_PATH", chosen.params.get("path", "fused") if chosen else "fused")


def ranks(world: int, fn: Any, *arguments: Any) -> list[Any]:
    return kept_ranks.run(fn, *arguments, ranks_per_node=world, accelerator="hopper")


@several
@paths
def test_each_rank_keeps_its_results_as_long_as_it_likes(path: str, world: int) -> None:
    found = ranks(world, output_ranks.kept, SHAPES, 40, 1)
    assert [text for failures, _ in found for text in failures] == []
    places = [at for _, at in found]
    assert all(any(at is not None for at in each) for each in places)
    assert len({tuple(each) for each in places}) == world  # else it would show nothing


@several
@paths
def test_many_calls_in_the_queue_of_two_streams(path: str, world: int) -> None:
    assert [text for each in ranks(world, output_ranks.queued, SHAPES, 30) for text in each] == []


@several
@paths
@pytest.mark.parametrize("own", [True, False], ids=["pool", "ordinary"])
def test_graphs(own: bool, path: str, world: int) -> None:
    for failures, lands in ranks(world, output_ranks.replayed, SHAPES[0], 20, own):
        assert failures == []
        assert lands == own


@takes_ranks(2)
@pytest.mark.alone  # it looks at the device's free memory
@paths
def test_results_outlive_their_world(path: str) -> None:
    found = mkernel.launch(
        output_ranks.outlived, SHAPES[0], ranks_per_node=2, accelerator="hopper", timeout_s=TOLD_S
    )
    assert [text for each in found for text in each] == []


@takes_ranks(2)
@paths
def test_what_lands_elsewhere_is_seen(path: str) -> None:
    found = mkernel.launch(
        output_ranks.shifted, SHAPES[0], ranks_per_node=2, accelerator="hopper", timeout_s=TOLD_S
    )
    assert all(found)


@takes_ranks(2)
def test_a_rank_without_such_memory_gets_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_HOPPER_OUTPUTS", "0")
    found = mkernel.launch(
        output_ranks.queued, SHAPES, 6, ranks_per_node=2, accelerator="hopper", timeout_s=TOLD_S
    )
    assert [text for each in found for text in each] == []


@takes_ranks(2)
def test_a_process_ends_before_a_graph_whose_memory_peers_write() -> None:
    """Torch ends one where a pool goes that a graph has, which is then not its own end."""
    program = (
        "import mkernel, torch; mkernel.init(accelerator='hopper')\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph, pool=mkernel.graph_pool()):\n"
        "    kept = torch.ones(8 << 20, device='cuda')\n"
        "graph.replay(); torch.cuda.synchronize(); print(float(kept.sum()))"
    )
    launched = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    alone = {name: value for name, value in os.environ.items() if name not in launched}
    for end in ("", "\nmkernel.finalize()"):
        done = subprocess.run(
            [sys.executable, "-c", program + end], env=alone,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "8388608.0\n"), done.stderr
