"""What every op does between checking its arguments and launching: plan for the current world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mkernel.plan.model import DtypeName, LaunchPlan, PathChoice
from mkernel.plan.planner import plan
from mkernel.world import CallRecord, World


@dataclass(frozen=True)
class Done:
    """A finished call: its plan, its record (times, trace), its outputs by name."""

    plan: LaunchPlan
    record: CallRecord
    outputs: Mapping[str, Any]


def plan_for(
    world: World,
    op: str,
    sizes: Mapping[str, int],
    dtype: DtypeName,
    out_dtype: DtypeName,
    *,
    b_layout: Literal["row", "column"] = "row",
    chunk: int | None = None,
    path: PathChoice | None = None,
) -> LaunchPlan:
    """The plan of one call in a world. Raises what :func:`mkernel.plan.planner.plan` raises.

    ``path``: instead of the setting's. Remembered by the world: checking a call's sizes again would
    cost more than a small message.
    """
    key = (op, *sizes.items(), dtype, out_dtype, b_layout, repr(chunk), path)
    found = world.planned.get(key)
    if found is None:
        found = world.planned[key] = _plan_for(
            world, op, sizes, dtype, out_dtype, b_layout=b_layout, chunk=chunk, path=path
        )
    return found


def _plan_for(
    world: World,
    op: str,
    sizes: Mapping[str, int],
    dtype: DtypeName,
    out_dtype: DtypeName,
    *,
    b_layout: Literal["row", "column"],
    chunk: int | None,
    path: PathChoice | None,
) -> LaunchPlan:
    return plan(
        op,
        sizes,
        dtype=dtype,
        out_dtype=out_dtype,
        b_layout=b_layout,
        nodes=world.identity.nodes,
        ranks_per_node=world.identity.ranks_per_node,
        accelerator=world.backends.accelerator,
        capabilities=world.accelerator.capabilities(),
        nic=world.backends.nic,
        verbs=world.backends.verbs,
        topology=world.topology,
        chunk=chunk,
        path=path or world.settings.path,
        pinning=world.settings.pinning,
    )
