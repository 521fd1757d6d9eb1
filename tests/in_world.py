"""What tests of whole worlds share: clients of a store, one judged call, and how a world broke."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import mkernel
from mkernel.cases import Case
from mkernel.conformance.checks.failures import rank_outcome
from mkernel.world.groups import Group

DEADLINE_S = 240.0
TOLD_S = DEADLINE_S / 2
"""Of what must come well before a deadline, however busy the machine is."""
ABSENT_S = 1.5
"""The deadline that ``survivors`` gives ranks where one stays away."""


@contextlib.contextmanager
def own_port() -> Iterator[int]:
    """A port of 127.0.0.1 at which nobody listens, and that the system gives to nobody else meanwhile.
    A store can still listen there, because it reuses addresses too."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def stores(port: int) -> tuple[TCPStore, TCPStore]:
    """Two clients of this host's store, as :func:`mkernel.init` takes them."""
    one, two = (TCPStore("127.0.0.1", port, wait_for_workers=False) for _ in range(2))
    return one, two


def arrivals(whole: torch.Tensor, shards: Sequence[torch.Tensor], mask: int) -> list[str]:
    """How each rank's rows arrived in a gathered A: ``intact``; ``scrambled``, as a soft device does
    with every byte that it carries (``MKERNEL_SOFTVERBS_SCRAMBLE``); or ``neither``."""
    found = []
    for got, shard in zip(whole.chunk(len(shards)), shards, strict=True):
        here, sent = got.view(torch.uint8), shard.view(torch.uint8)
        if torch.equal(here, sent):
            found.append("intact")
        else:
            found.append("scrambled" if torch.equal(here, sent ^ mask) else "neither")
    return found


def shards(
    seed: int, size: int, rows: int, k: int, n: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Every rank's rows of ``a``, and ``b``, in half."""
    generator = torch.Generator().manual_seed(seed)
    a = [torch.randn(rows, k, generator=generator).half() for _ in range(size)]
    return a, torch.randn(k, n, generator=generator).half()


def relative(result: torch.Tensor, reference: torch.Tensor) -> float:
    """The relative error of a result."""
    return float((result.double() - reference).norm() / reference.norm())


def gathers(seed: int, rows: int = 64, k: int = 256, n: int = 128, group: Group = None) -> float:
    """The relative error of one AllGather+GEMM call in the world of a group, with fresh inputs."""
    world = mkernel.world(group)
    a, b = shards(seed, world.size, rows, k, n)
    c = mkernel.all_gather_gemm(a[world.rank], b, out_dtype=torch.float32, group=group)
    return relative(c, torch.cat(a).double() @ b.double())


def survivors(case: Case, victim: int, action: str, **world: Any) -> list[tuple[str, float, str]]:
    """(error type, seconds until it was raised, message) of all ranks but the victim, each of which
    must have reported; :func:`.failures.rank_outcome` says what happens."""
    seen: dict[int, tuple[str, float, str]] = {}
    with pytest.raises(BaseException):  # noqa: B017,PT011 - whatever launch raises, the ranks judge
        mkernel.launch(rank_outcome, case, victim, action, on_report=seen.__setitem__, **world)
    ranks = world.get("nodes", 1) * world["ranks_per_node"]
    assert sorted(seen) == [rank for rank in range(ranks) if rank != victim]
    return list(seen.values())
