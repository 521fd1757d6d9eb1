"""Files of plans and calls, with which a world makes its calls known before the first of them
(``MKERNEL_PLANS``).

A world that records (:class:`Recording`) notes each call that Python makes: the op, a description of
its arguments, and the plan. A world that loads the file launches the same calls on scratch tensors.
So ranks plan nothing, agree on each plan, allocate its memory and make its executors, and native code
knows the calls afterwards. Planning is a pure function; the file names what it was given, and a world
that would give it anything else refuses the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr
from torch import Tensor

from mkernel.errors import InputFileError, MkernelError, PlanMismatch
from mkernel.ops.registration import native_ops
from mkernel.plan.model import LaunchPlan, first_difference
from mkernel.schema_version import SchemaVersion
from mkernel.settings import PLANNED_SETTINGS
from mkernel.topology.model import Model, fingerprint
from mkernel.user_files import write_file
from mkernel.version import __version__
from mkernel.world.world import World

_MOST_VALUES = 4096
"""The most integers of an argument that a file holds, such as offsets of documents."""
_ROWS_OF_EXPERTS = ("y", "h", "h_scale")
"""Arguments with a row for each row of a rank's experts, whose number follows from the routing."""
_REMEDY = (
    "make it anew, by mkernel.warm(..., save=FILE) on ranks like these, or unset MKERNEL_PLANS"
)


class StoredTensor(Model):
    """A tensor among a call's arguments, without its data, which is zeros.

    Attributes:
        experts: it holds experts of tokens, spread evenly over so many. values: its integers.
        rows: ``counts``: as many as the call's ``counts`` add up to.
    """

    shape: tuple[Annotated[int, Field(ge=0)], ...]
    stride: tuple[Annotated[int, Field(ge=0)], ...]
    dtype: str
    experts: int | None = Field(None, ge=1)
    values: tuple[int, ...] | None = None
    rows: Literal["shape", "counts"] = "shape"


class StoredResult(Model):
    """An argument that an earlier call of the file returned: its number there, and which result."""

    call: int = Field(ge=0)
    result: int = Field(ge=0)


Argument: TypeAlias = (
    StoredTensor
    | StoredResult
    | tuple[StoredTensor, ...]
    | StrictBool
    | StrictInt
    | StrictFloat
    | StrictStr
    | None
)
"""An argument of a call; a dtype is text that begins with ``torch.``."""


class StoredCall(Model):
    """A call: the native op, and its arguments by name, without the group."""

    op: str
    arguments: dict[str, Argument]


class PlanFile(Model):
    """The content of a file.

    Attributes:
        made_for: what plans follow from (:func:`made_for`).
        digests: of the plans, when the file was written.
        plans: by what was asked of the planner (:meth:`mkernel.plan.planner.Plans.request`).
    """

    format: Annotated[Literal["mkernel-plans-1"], SchemaVersion]
    made_for: dict[str, str]
    digests: dict[str, str]
    plans: dict[str, LaunchPlan]
    calls: tuple[StoredCall, ...]


def made_for(world: World) -> dict[str, str]:
    """Return all that plans of a world follow from, by name; digests of what is large."""
    settings, identity = world.settings, world.identity
    nics = settings.nic_settings.model_dump(mode="json", include=PLANNED_SETTINGS)
    found = {
        "version of mkernel": __version__,
        "nodes": f"{identity.nodes}",
        "ranks per node": f"{identity.ranks_per_node}",
        "accelerators": ",".join(world.backends.accelerators),
        "nic": f"{world.backends.nic}",
        "verbs": f"{world.backends.verbs}",
        "MKERNEL_PATH": settings.path,
        "MKERNEL_EXCHANGE": settings.exchange,
        "MKERNEL_INVARIANT": f"{settings.invariant}, {settings.invariant_segments} segments, "
        f"{settings.invariant_partial_dtype}",
        "settings of NICs": fingerprint(nics),
        "MKERNEL_PINNING": settings.pinning.fingerprint,
    }
    for engine in world.engines():
        name, where = engine.backends.accelerator, engine.map
        # How much memory a NUMA node has differs from one start of a host to the next.
        numa = {"numa": {"__all__": {"memory_bytes"}}}
        kinds = [one.model_dump(mode="json", exclude=numa) for one in where.kinds.prototypes]
        constants = None if where.constants is None else where.constants.model_dump(mode="json")
        found[f"topology ({name})"] = fingerprint({"of": list(where.kinds.of), "kinds": kinds})
        found[f"constants ({name})"] = fingerprint({"constants": constants})
        found[f"capabilities ({name})"] = engine.claims.fingerprint
    return found


class Recording:
    """The plans and calls of a world since it records.

    Attributes:
        plans: by what was asked of the planner.
    """

    def __init__(self) -> None:
        self.plans: dict[str, LaunchPlan] = {}
        self._calls: list[StoredCall] = []
        self._integers: dict[int, tuple[StoredResult, Tensor]] = {}  # by id; held, to keep the id

    def add(self, op: str, given: Mapping[str, Any], plan: LaunchPlan, result: Any) -> None:
        """Note a call that native code will know: its native op, arguments, plan and result."""
        counts = given.get("counts")
        rows = int(counts.sum()) if isinstance(counts, Tensor) else -1
        experts = getattr(plan.shape, "experts", None)

        def stored(name: str, value: Any) -> Argument:
            if isinstance(value, torch.dtype):
                return f"{value}"
            if isinstance(value, list | tuple):
                return tuple(_stored_tensor(each) for each in value)
            if not isinstance(value, Tensor):
                plain: Argument = value
                return plain
            if (known := self._integers.get(id(value))) is not None:
                return known[0]
            update: dict[str, Any] = {}
            if name == "topk_ids":
                update["experts"] = experts
            elif not value.is_floating_point() and value.numel() <= _MOST_VALUES:
                update["values"] = tuple(value.flatten().tolist())
            elif name in _ROWS_OF_EXPERTS and len(value) == rows:
                update["rows"] = "counts"
            return _stored_tensor(value).model_copy(update=update)

        arguments = {name: stored(name, each) for name, each in given.items() if name != "group"}
        results = result if isinstance(result, list | tuple) else (result,)
        for number, each in enumerate(results):
            if isinstance(each, Tensor) and not each.is_floating_point():
                where = StoredResult(call=len(self._calls), result=number)
                self._integers[id(each)] = (where, each)
        self._calls.append(StoredCall(op=op, arguments=arguments))

    def save(self, world: World, path: Path) -> None:
        """Write the file, whole or not at all. InputFileError: it cannot be written."""
        made = PlanFile(
            format="mkernel-plans-1",
            made_for=made_for(world),
            digests={name: each.digest() for name, each in self.plans.items()},
            plans=self.plans,
            calls=tuple(self._calls),
        )
        try:
            write_file(path, made.model_dump_json() + "\n")
        except OSError as error:
            why = error.strerror or error
            raise InputFileError(f"file of plans {path}: cannot be written: {why}") from error


def load(world: World, path: Path) -> None:
    """Make the calls of a file known to a world. Collective: every rank, with the same file.

    Raises:
        InputFileError: a rank cannot read the file, or it is of another machine, version or setting;
            every rank raises it.
        PlanMismatch: ranks have different files. WorldError: what broke a call.
    """
    found: PlanFile | None = None
    error, digest = "", ""
    try:
        found = PlanFile.from_file(path, "MKERNEL_PLANS")
        _check(found, world, path)
        digest = sha256(found.model_dump_json().encode()).hexdigest()
    except MkernelError as refused:
        error = str(refused)
    told = world.gather("plans file", {"file": digest, "error": error})
    for rank, other in told.items():
        if other["error"]:
            raise InputFileError(error or f"rank {rank}: {other['error']}")
    expect_alike("MKERNEL_PLANS", told)
    assert found is not None
    world.stored = found.plans
    _replay(world, found.calls, path)


def expect_alike(what: str, told: Mapping[int, Any]) -> None:
    """Raise PlanMismatch, which names the first part of ``what`` that a rank and rank 0 tell
    differently."""
    for rank, other in told.items():
        differs = first_difference(told[0], other, what)
        if differs is not None:
            name, one, two = differs
            raise PlanMismatch((0, rank), name, (one, two), "it is the same on all ranks")


def _check(found: PlanFile, world: World, path: Path) -> None:
    """Raise InputFileError where plans of this world would be others."""
    differs = first_difference(found.made_for, made_for(world))
    if differs is not None:
        name, theirs, ours = differs
        shown = [f"{one}"[:12] for one in (theirs, ours)]
        raise InputFileError(
            f"MKERNEL_PLANS {path} was made for another world: {name} is {shown[1]} here, and "
            f"{shown[0]} in the file; {_REMEDY}"
        )
    for name, each in found.plans.items():
        if each.digest() != found.digests.get(name):
            raise InputFileError(
                f"MKERNEL_PLANS {path}: the plan of {name} was changed after it was written; {_REMEDY}"
            )


@torch.no_grad()
def _replay(world: World, calls: Sequence[StoredCall], path: Path) -> None:
    wanted = {each for call in calls for each in _results(call)}
    kept: dict[tuple[int, int], Any] = {}
    for number, call in enumerate(calls):
        op = native_ops.get(call.op)
        if op is None:
            raise InputFileError(f"MKERNEL_PLANS {path}: no op {call.op!r}; {_REMEDY}")
        made = op(**_arguments(world, call, kept), group=world.name)
        for index, each in enumerate(made if isinstance(made, list | tuple) else (made,)):
            if (number, index) in wanted:
                kept[number, index] = each
    world.synchronize()


def _results(call: StoredCall) -> Iterator[tuple[int, int]]:
    for each in call.arguments.values():
        if isinstance(each, StoredResult):
            yield each.call, each.result


def _arguments(
    world: World, call: StoredCall, kept: Mapping[tuple[int, int], Any]
) -> dict[str, Any]:
    """Make the arguments of a call, in scratch memory."""
    counts = call.arguments.get("counts")
    rows = None
    if isinstance(counts, StoredResult):
        rows = int(kept[counts.call, counts.result].sum())
    device = world.accelerator.device

    def made(each: Argument) -> Any:
        if isinstance(each, StoredTensor):
            return _scratch(each, rows, world.rank, device)
        if isinstance(each, StoredResult):
            return kept[each.call, each.result]
        if isinstance(each, str) and each.startswith("torch."):
            return _dtype(each)
        return [made(one) for one in each] if isinstance(each, tuple) else each

    return {name: made(each) for name, each in call.arguments.items()}


def _scratch(given: StoredTensor, rows: int | None, rank: int, device: str) -> Tensor:
    shape, dtype = given.shape, _dtype(given.dtype)
    if given.experts is not None:
        return spread_ids(shape, given.experts, rank).to(device, dtype)
    if given.values is not None:
        return torch.tensor(given.values, dtype=dtype, device=device).view(shape)
    if given.rows == "counts" and rows is not None:
        shape = (rows, *shape[1:])
    made = torch.empty_strided(shape, given.stride, dtype=dtype, device=device)
    return made.zero_()


def spread_ids(shape: Sequence[int], experts: int, rank: int) -> Tensor:
    """Return ids of experts for the tokens of a rank, each of them for as many slots, on the CPU."""
    return torch.arange(torch.Size(shape).numel()).add_(rank).remainder_(experts).view(*shape)


def _stored_tensor(tensor: Tensor) -> StoredTensor:
    return StoredTensor(
        shape=tuple(tensor.shape), stride=tuple(tensor.stride()), dtype=f"{tensor.dtype}"
    )


def _dtype(name: str) -> torch.dtype:
    """Return a dtype by its name, ``torch.`` before it. InputFileError."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InputFileError(f"MKERNEL_PLANS: {name!r} is no dtype of torch's; {_REMEDY}")
    return found
