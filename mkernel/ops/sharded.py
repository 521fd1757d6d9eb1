"""DTensor arguments: a rank's part of one, where it is sharded as an op takes it.

An op's arguments are each rank's own part, and so are its results. Gradients go back through
``DTensor.to_local``: that of a sharded argument is sharded alike, that of a replicated one the same on
every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mkernel.errors import ArgumentError
from mkernel.world.groups import Group, global_ranks
from mkernel.world.lifecycle import current

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def local(name: str, value: Any, dim: int | None, group: Group) -> Any:
    """Return ``value``, or the part of a DTensor that is on this rank.

    Args:
        dim: along which the op takes it sharded, as torch counts them; None: it takes it replicated.

    Raises:
        ArgumentError: a DTensor that is placed otherwise, or on other ranks than the group's.
    """
    kind = type(value)
    if kind is Tensor or kind is Parameter or not isinstance(value, Tensor):
        return value
    if not (hasattr(value, "placements") and hasattr(value, "device_mesh")):
        return value  # of another subclass, which is refused where it is examined
    sharded: Any = value
    mesh, placements = sharded.device_mesh, sharded.placements
    if mesh.ndim != 1 or not _is_of_group(mesh, group):
        raise ArgumentError(
            name,
            f"a DTensor on {mesh}",
            "one on a 1-D mesh of the ranks of the group, in their order; else pass its local part, "
            ".to_local()",
        )
    if dim is not None and dim < 0:
        dim += value.dim()
    fits = placements[0].is_replicate() if dim is None else placements[0].is_shard(dim)
    if not fits:
        wanted = "Replicate()" if dim is None else f"Shard({dim})"
        raise ArgumentError(
            name,
            f"a DTensor placed {tuple(placements)}",
            f"{wanted}: call .redistribute(placements=[{wanted}]), or pass what is this rank's part "
            "in the op's sense, .to_local()",
        )
    part = sharded.to_local()
    if dim is not None and part.shape[dim] * mesh.size() != value.shape[dim]:
        raise ArgumentError(
            name,
            f"a DTensor of {tuple(value.shape)}",
            f"one that {mesh.size()} ranks can share evenly along dimension {dim}",
        )
    return part


def _is_of_group(mesh: DeviceMesh, group: Group) -> bool:
    """Return whether a mesh of one dimension has the ranks of a group's world."""
    world = current(group)
    if mesh.size() != world.size or mesh.get_local_rank() != world.rank:
        return False
    names = torch.distributed.distributed_c10d._world.pg_names.values()
    if world.name not in names:  # it was made of all ranks
        return mesh.size() == torch.distributed.get_world_size()
    name: Any = world.name
    of_world = torch.distributed.distributed_c10d._resolve_process_group(name)
    return global_ranks(mesh.get_group()) == global_ranks(of_world)


_is_of_group.__dict__["_dynamo_marked_constant"] = True  # meshes and worlds stay what they are
