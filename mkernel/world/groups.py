"""The values of ``group=``, and what torch's process group says about the world of its ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import torch
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from mkernel.errors import ArgumentError
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.process_group import innermost
from mkernel.world.watchdog import host_identity

if TYPE_CHECKING:
    from mkernel.world.world import World


Group: TypeAlias = Union[str, ProcessGroup, DeviceMesh, "World", None]
"""Names a world of this process: by its torch process group, a mesh of one dimension, the group's
name, or itself. None: the default world."""


def process_group(group: object) -> ProcessGroup:
    """Return the process group that a world is to be made of.

    Raises:
        ArgumentError: it is neither a ProcessGroup nor a DeviceMesh of one dimension, or this rank is
        not in it.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ()
            example = f"mesh[{names[0]!r}]" if names else "a slice of it"
            raise ArgumentError(
                "group",
                f"a DeviceMesh of {group.ndim} dimensions",
                f"one of 1 dimension, such as {example}",
            )
        if group.get_coordinate() is None:
            raise ArgumentError(
                "group", "a DeviceMesh without this rank", "one that this rank is in"
            )
        group = group.get_group()
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("group", "a group without this rank", "one that this rank is in")
    if not isinstance(group, ProcessGroup):
        raise ArgumentError(
            "group",
            type(group).__name__,
            "a torch.distributed.ProcessGroup, or a DeviceMesh of 1 dimension",
        )
    return group


def global_ranks(group: ProcessGroup) -> list[int]:
    """Return the ranks of a group in torch's default one, by rank in the group."""
    return list(torch.distributed.get_process_group_ranks(group))


def stores(group: ProcessGroup) -> tuple[Store, Store]:
    """Return two clients of the group's store, neither of which anybody else uses: requests of one
    client wait for each other, and torch lets some block."""
    own: Any = torch.distributed.distributed_c10d._get_process_group_store(group)
    return _client(own, group), _client(own, group)


def _client(store: Any, group: ProcessGroup) -> Store:
    if hasattr(store, "clone"):
        made: Store = store.clone()
        return made
    inner = innermost(store)  # before torch 2.9 only a client of this one can be made
    if not isinstance(inner, TCPStore):  # of one process, or of files: nothing blocks there
        return PrefixStore(f"group/{_hashed(group)}", inner)
    client = TCPStore(inner.host, inner.port, wait_for_workers=False)
    return PrefixStore(f"group/{_hashed(group)}", client)


def _hashed(group: ProcessGroup) -> str:
    """Return a hash that differs between groups of a job, also where torch names them alike."""
    ranks = ",".join(map(str, global_ranks(group)))
    return hashlib.sha256(f"{group.group_name}/{ranks}".encode()).hexdigest()[:16]


def meet(
    store: Store, key: bytes, rank: int, size: int, part: int, timeout_s: float
) -> list[tuple[str, int]]:
    """Gather the host of every rank, and the emulated node of it: each rank says which one it is on,
    and nobody assumes it. Collective. Timeout, Untrusted.

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
