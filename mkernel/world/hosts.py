"""The hosts of a group's ranks: each rank says which one it is on, and nobody assumes it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import Store

from mkernel.errors import ArgumentError
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.watchdog import host_identity


def meet(
    store: Store, key: bytes, rank: int, size: int, part: int, timeout_s: float
) -> list[tuple[str, int]]:
    """Gather the host of every rank, and the emulated node of it. Collective. Timeout, Untrusted.

    Args:
        key: seals the messages. part: this rank's emulated node; 0 where hosts are not split.
    """
    told = Bootstrap(store, key)
    told.publish(f"host/{rank}", [host_identity(), part])
    found = told.collect("host", range(size), timeout_s)
    return [(found[each][0], found[each][1]) for each in range(size)]


def nodes(hosts: Sequence[tuple[str, int]], names: Sequence[int]) -> int:
    """Count the nodes of a group whose ranks are on these hosts.

    Args:
        names: what to call the ranks in messages.

    Raises:
        ArgumentError: hosts have different numbers of ranks, or a host's do not follow one another.
    """
    on: dict[tuple[str, int], list[int]] = {}
    for rank, host in enumerate(hosts):
        on.setdefault(host, []).append(rank)
    shown = "; ".join(
        f"{host.partition('/')[0]}: {', '.join(str(names[rank]) for rank in ranks)}"
        for (host, _), ranks in on.items()
    )
    if len({len(ranks) for ranks in on.values()}) != 1:
        raise ArgumentError(
            "group", f"ranks on {shown}", "a group with as many ranks on every host that it is on"
        )
    if any(ranks[-1] - ranks[0] >= len(ranks) for ranks in on.values()):
        raise ArgumentError(
            "group", f"ranks on {shown}", "a group in which ranks of one host follow one another"
        )
    return len(on)
