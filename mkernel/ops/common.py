"""The steps of every op before its launch: check a call like no other before it, plan for the world."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypedDict

from typing_extensions import Unpack

from mkernel.backends.contracts.instrumented import View
from mkernel.plan.arguments import NOTHING, Around, path_of
from mkernel.plan.invariance import resolved
from mkernel.plan.model import DtypeName, LaunchPlan, PathChoice, Scales
from mkernel.plan.planner import Plans
from mkernel.plan.shapes import takes
from mkernel.world.calls import CallRecord
from mkernel.world.engine import Engine
from mkernel.world.world import World


class Execution(TypedDict, total=False):
    """Options by which a call is run, beyond what the public ops offer.

    ``view``: default the product's. ``trace``: keep an instruction record; default not. ``wait``: to
    the call's end, also with a stream-ordered accelerator, so that the record has times; default not.
    """

    view: View
    trace: bool
    wait: bool


class Done(NamedTuple):
    """A finished call: its plan, its record (times, trace), its outputs by name."""

    plan: LaunchPlan
    record: CallRecord
    outputs: Mapping[str, Any]


def engine_for(
    world: World,
    op: str,
    sizes: Mapping[str, Any],
    dtype: str | None,
    scales: Scales | None = None,
) -> Engine:
    """Return the engine that runs a call of these sizes. Unsupported."""
    if not world.backends.companions:
        return world.engine(op)
    return world.engine(op, lambda claims: takes(claims, op, sizes, world.size, dtype, scales))


class _Kind(TypedDict, total=False):
    """Options of calls with the same plans. ``path``: instead of the setting's. ``invariant``: as
    registered ops take it."""

    b_layout: Literal["row", "column"]
    around: Around
    path: PathChoice | None
    invariant: str | None


def plan_for(
    world: World,
    op: str,
    sizes: Mapping[str, Any],
    dtype: DtypeName,
    out_dtype: DtypeName,
    *,
    chunk: int | None = None,
    **kind: Unpack[_Kind],
) -> LaunchPlan:
    """Make the plan of one call in a world. Raises what :func:`mkernel.plan.planner.plan` raises."""
    return planned(world, plans_for(world, op, sizes, dtype, out_dtype, **kind), sizes, chunk)


def plans_for(
    world: World,
    op: str,
    sizes: Mapping[str, Any],
    dtype: DtypeName,
    out_dtype: DtypeName,
    *,
    b_layout: Literal["row", "column"] = "row",
    around: Around = NOTHING,
    path: PathChoice | None = None,
    invariant: str | None = None,
) -> Plans:
    """Return the plans of calls in a world that are like one of these sizes; the arguments are those
    of :func:`plan_for`."""
    engine = engine_for(world, op, sizes, dtype, around.scales)
    claims = engine.claims
    if promise := resolved(invariant, world.settings):
        around = around._replace(invariant=promise)
    key = (op, dtype, out_dtype, b_layout, around, path, engine)
    found = world.plans[key]
    if found is None or found.capabilities != claims:
        found = world.plans[key] = Plans(
            op, dtype, out_dtype, b_layout, around, engine.map, engine.backends.accelerator,
            claims, engine.backends.nic, engine.backends.verbs,
            path=path or path_of(op, world.settings.path), exchange=world.settings.exchange,
            schedule=engine.accelerator.schedule,
        )  # fmt: skip
    return found


def planned(
    world: World, plans: Plans, sizes: Mapping[str, Any], chunk: int | None = None
) -> LaunchPlan:
    """Plan a call of these sizes. The world remembers the plan: checking a call's sizes again would
    cost more than a small message. Where it has read a file of plans, that is asked first."""
    key = (plans, *sizes.items(), repr(chunk))
    found = world.planned[key]
    if found is None and world.stored:
        found = world.planned[key] = world.stored.get(plans.request(sizes, chunk))
    if found is None:
        found = world.planned[key] = plans.plan(sizes, chunk)
        world.plan_made(found)
    if world.recording is not None:
        world.recording.plans[plans.request(sizes, chunk)] = found
    return found
