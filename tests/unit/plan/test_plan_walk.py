"""The walk over a plan's fields finds what no launch follows, and misses no field."""

from __future__ import annotations

from typing import Any

import plan_walk
import pytest
from plan_walk import decorations, dotted, leaves, others, put
from plan_worlds import make

from mkernel.errors import ArgumentError, Unsupported
from mkernel.plan.model import LaunchPlan
from mkernel.plan.standard import TileSchedule

PLAN = make()


class Decorated(TileSchedule):
    """Has fields that nothing reads."""

    kind: Any = "tests.decorated"  # type: ignore[mutable-override]
    colour: str = "red"
    sizes: tuple[int, ...] = (1, 2)
    flag: bool = False
    maybe: int | None = None


def launch(plan: LaunchPlan) -> object:
    """Follows all but what is added to a schedule."""
    how = plan.part(TileSchedule)
    followed = {name: str(getattr(how, name)) for name in TileSchedule.model_fields}
    shared = plan.model_copy(update={"schedule": None, "prediction": None})
    return str(sorted(followed.items())), str(dict(shared))


def test_what_is_added_and_not_followed_is_found() -> None:
    assert decorations(PLAN, launch) == []
    part = Decorated(**{**dict(PLAN.part(TileSchedule)), "kind": "tests.decorated"})
    found = decorations(PLAN.model_copy(update={"schedule": part}), launch)
    assert found == [
        "schedule.colour: 'red' or 'red-other'",
        "schedule.sizes: (1, 2) or (1, 2, 2)", "schedule.sizes: (1, 2) or (1,)",
        "schedule.sizes[0]: 1 or 2", "schedule.sizes[0]: 1 or 0", "schedule.sizes[0]: 1 or 2",
        "schedule.sizes[1]: 2 or 3", "schedule.sizes[1]: 2 or 1", "schedule.sizes[1]: 2 or 4",
        "schedule.flag: False or True",
        "schedule.maybe: None or 1",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: values may be illegal
def test_every_field_of_the_model_is_walked() -> None:
    """But the prediction: the places of scalars are those of the JSON."""

    def scalars(value: Any, path: tuple[Any, ...] = ()) -> set[str]:
        if isinstance(value, dict | list):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            return {leaf for key, each in inner for leaf in scalars(each, (*path, key))}
        return {dotted(path)}

    walked = {dotted(path) for path, *_ in leaves(PLAN)}
    assert scalars(PLAN.decisions()) <= walked
    assert not any(path.startswith("prediction") for path in walked)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_another_value_is_another_value() -> None:
    for path, value, annotation in leaves(PLAN):
        for other in others(value, annotation):
            assert other != value
            changed = put(PLAN, path, other)
            same = path[0] == "copies"  # a rank's own, which peers do not see
            assert (changed.digest() == PLAN.digest()) is same, dotted(path)


@pytest.mark.parametrize(
    ("error", "counts"),
    [(Unsupported("no"), True), (ArgumentError("x", 1, "2"), True), (ValueError("tile_m"), True)],
)
def test_refusals(error: Exception, counts: bool) -> None:
    def refusing(plan: LaunchPlan) -> object:
        if plan != PLAN:
            raise error
        return 0

    path = ("schedule", "chunking", "tile_m")
    assert plan_walk._shows(put(PLAN, path, 1), path, refusing, 0) is counts


def test_an_error_that_names_nothing_is_no_refusal() -> None:
    def failing(plan: LaunchPlan) -> object:
        raise ValueError("list index out of range")

    with pytest.raises(AssertionError, match="names nothing"):
        plan_walk._shows(PLAN, ("schedule", "order"), failing, 0)
