"""Walks every field of a plan but what was predicted: another value is another launch, or refused."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge
from pydantic import BaseModel

from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.errors import MkernelError
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.invariance import Invariant
from mkernel.plan.model import PREDICTED, GemmShape, LaunchPlan, SumShape
from mkernel.plan.planner import plan as plan_of
from mkernel.topology.model import Topology
from mkernel.topology.world_map import world_map
from mkernel.world.agreement import admit_plan, admit_tensors
from mkernel.world.identity import Backends

FOLLOWED_BY_OPS = ("copies", "bias", "norm", "products")
"""What of a plan of a GEMM op the op follows, around the launch (``tests/torch/test_operands.py``,
``tests/torch/test_norm.py``)."""

Path = tuple[str | int, ...]
Launch = Callable[[LaunchPlan], object]
"""Everything that launches of a plan do, to compare; its errors are the plan's refusals."""


class WalkedWorld:
    """What a world has of plans: how they are made, and which it admits."""

    def __init__(
        self,
        accelerator: AcceleratorBackend,
        topology: Topology,
        ranks_per_node: int,
        claims: AcceleratorCapabilities | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.claims = claims or accelerator.capabilities()
        nic = None if len(topology.nodes) == 1 or self.claims.process_group else "cx7"
        self.backends = Backends(accelerator.name, nic, nic and "soft")
        self.map = world_map(
            topology, ranks_per_node, self.claims.constants, group=self.claims.process_group
        )

    def plan(self, op: str, sizes: dict[str, int], **options: Any) -> LaunchPlan:
        return plan_of(
            op, sizes, world=self.map, accelerator=self.backends.accelerator,
            capabilities=self.claims, nic=self.backends.nic, verbs=self.backends.verbs,
            schedule=self.accelerator.schedule, **options,
        )  # fmt: skip

    def admit(self, plan: LaunchPlan, tensors: dict[str, Any]) -> None:
        admit_plan(plan, self.map, self.backends, self.accelerator)
        admit_tensors(plan, tensors, self.accelerator.capabilities())


def decorations(plan: LaunchPlan, launch: Launch) -> list[str]:
    """Fields that a launch neither follows nor refuses, with the values that made no difference."""
    usual = launch(plan)
    assert launch(plan) == usual, "launches of one plan differ"
    return [
        f"{dotted(path)}: {value!r} or {other!r}"
        for path, value, annotation in leaves(plan)
        if path[0] not in _followed_by_op(plan)
        for other in others(value, annotation)
        if not _shows(put(plan, path, other), path, launch, usual)
    ]


def _followed_by_op(plan: LaunchPlan) -> tuple[str, ...]:
    if isinstance(plan.shape, SumShape):
        return ("norm",)
    return FOLLOWED_BY_OPS if isinstance(plan.shape, GemmShape) else ()


def _shows(plan: LaunchPlan, path: Path, launch: Launch, usual: object) -> bool:
    try:
        return launch(plan) != usual
    except MkernelError:
        return True
    except (ValueError, TypeError) as error:  # of native code and models, which name what is wrong
        if any(str(part) in str(error) for part in path if isinstance(part, str)):
            return True
        raise AssertionError(f"{dotted(path)}: an error that names nothing of it") from error


def dotted(path: Path) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]


def leaves(plan: BaseModel) -> Iterator[tuple[Path, Any, Any]]:
    """(path, value, annotation) of every field, by the models' own lists of them."""
    for name, field in type(plan).model_fields.items():
        if not (isinstance(plan, LaunchPlan) and name in PREDICTED):
            annotation: Any = field.annotation
            if field.metadata:
                annotation = Annotated[(annotation, *field.metadata)]
            yield from _leaves((name,), getattr(plan, name), annotation)


def _leaves(path: Path, value: Any, annotation: Any) -> Iterator[tuple[Path, Any, Any]]:
    if isinstance(value, BaseModel):
        if type(None) in _members(annotation):
            yield path, value, annotation
        for inner, leaf, of in leaves(value):
            yield (*path, *inner), leaf, of
        return
    yield path, value, annotation
    if isinstance(value, tuple):
        for number, element in enumerate(value):
            yield from _leaves((*path, number), element, _element(annotation, number))


def others(value: Any, annotation: Any) -> list[Any]:
    """Other values that look legal, by type."""
    members = _members(annotation)
    if value is None:
        return [example(next(each for each in members if each is not type(None)))]
    nothing: list[Any] = [None] if type(None) in members else []
    return nothing + [one for one in _alike(value, annotation) if one != value]


def _alike(value: Any, annotation: Any) -> list[Any]:
    members = _members(annotation)
    choices = [one for kind in members if get_origin(kind) is Literal for one in get_args(kind)]
    if isinstance(value, BaseModel) or len(choices) > 1:
        return choices
    if isinstance(value, Invariant):
        partial = "float16" if value.partial_dtype == "float32" else "float32"
        return [
            Invariant(2 * value.segments, value.partial_dtype),
            Invariant(value.segments, partial),
        ]
    if isinstance(value, tuple):
        more = value[-1] if value else example(_element(annotation, 0))
        return [(*value, more), value[:-1]]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        least = _least(annotation)
        return [one for one in (value + 1, value - 1, 2 * value) if one >= least]
    return [2 * value + 1] if isinstance(value, float) else [f"{value}-other"]


def example(annotation: Any) -> Any:
    """Some value of a type."""
    kind = _members(annotation)[0]
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if get_origin(kind) is tuple:
        return (example(get_args(kind)[0]),)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = kind.model_fields.items()
        needed = {name: example(f.annotation) for name, f in fields if f.is_required()}
        return kind.model_construct(**needed)
    return {int: 1, float: 1.0, str: "other", bool: True, Invariant: Invariant()}[kind]


def _least(annotation: Any) -> int:
    """The smallest legal integer."""
    limits = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return max((one.ge for one in limits if isinstance(one, Ge)), default=0)


def _members(annotation: Any) -> list[Any]:
    """The types of a union; of another type itself."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [each for member in get_args(annotation) for each in _members(member)]
    return [annotation]


def _element(annotation: Any, number: int) -> Any:
    kind = next(each for each in _members(annotation) if get_origin(each) is tuple)
    inner = get_args(kind)
    return inner[0] if inner[-1] is ... else inner[min(number, len(inner) - 1)]


def put(model: Any, path: Path, value: Any) -> Any:
    """The same with another value at a place, not validated."""
    if not path:
        return value
    first, *rest = path
    if isinstance(first, int):
        return (*model[:first], put(model[first], tuple(rest), value), *model[first + 1 :])
    fields = {name: getattr(model, name) for name in type(model).model_fields}
    fields[first] = put(fields[first], tuple(rest), value)
    return type(model).model_construct(**fields)
