"""One rank of a job, started by whatever starts ranks: ``python started_rank.py HOW FOLDER``.

HOW: ``alone``: torch.distributed is not initialized; ``actors``, ``processes``: this process starts the
ranks, which initialize it first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from groups_in_ranks import gathers, reduces
from torch import distributed

import mkernel


def work(folder: str) -> dict[str, Any]:
    """Make the world of all ranks, use it, and leave a note of how that went."""
    world = mkernel.init(accelerator="streams")
    errors = [gathers(None), reduces(world.name)]
    if not world.name.startswith("mkernel:"):
        everybody = distributed.new_group()
        mkernel.init(everybody, accelerator="ascend")
        errors.append(gathers(everybody))
    note = {
        "rank": world.rank, "size": world.size, "nodes": world.identity.nodes, "errors": errors,
        "name": world.name,
    }  # fmt: skip
    Path(folder, f"rank{world.rank}").write_text(json.dumps(note))
    mkernel.finalize()
    return note


def joined(rank: int, size: int, folder: str) -> dict[str, Any]:
    """``work`` in torch.distributed, without anything in the environment."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/torch", rank=rank, world_size=size
    )
    note = work(folder)
    distributed.destroy_process_group()
    return note


def as_actors(size: int, folder: str) -> None:
    """``joined`` in actors of Ray."""
    import ray

    ray.init(num_cpus=size, include_dashboard=False, object_store_memory=80 << 20)

    class Actor:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def join(self) -> dict[str, Any]:
            return joined(self.rank, size, folder)

    actors = [ray.remote(Actor).remote(rank) for rank in range(size)]
    ray.get([actor.join.remote() for actor in actors], timeout=200)
    ray.shutdown()


def as_processes(size: int, folder: str) -> None:
    """``joined`` in processes of torch.multiprocessing."""
    import torch.multiprocessing

    torch.multiprocessing.spawn(joined, args=(size, folder), nprocs=size)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    how, where = sys.argv[1:]
    if how == "alone":
        work(where)
    elif how == "actors":
        as_actors(2, where)
    else:
        as_processes(2, where)
