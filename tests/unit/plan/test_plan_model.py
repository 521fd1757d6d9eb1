from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_worlds import make
from pydantic import ValidationError

from mkernel.plan.model import PREDICTED, LaunchPlan, Schedule, first_difference
from mkernel.topology.model import Topology
from mkernel.topology.routes import Rail

PLAN = make()
DUMP: dict[str, Any] = PLAN.model_dump(mode="json")


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all scalars in a dump."""
    if isinstance(value, dict):
        return [leaf for key in value for leaf in leaves(value[key], (*path, key))]
    if isinstance(value, list):
        return [leaf for i, item in enumerate(value) for leaf in leaves(item, (*path, i))]
    return [path]


def planted(path: tuple[Any, ...]) -> dict[str, Any]:
    """The dump with another value at ``path``."""
    changed = copy.deepcopy(DUMP)
    place: Any = changed
    for part in path[:-1]:
        place = place[part]
    old = place[path[-1]]
    place[path[-1]] = f"{old}-other" if isinstance(old, str) else (old or 0) + 1
    return changed


def dotted(path: tuple[Any, ...]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


LEAVES = leaves(DUMP)


@given(st.sampled_from(LEAVES))
def test_first_difference_finds_the_planted_field(path: tuple[Any, ...]) -> None:
    changed = planted(path)
    found = first_difference(DUMP, changed)
    assert found is not None
    assert found[0] == dotted(path)
    assert found[1] != found[2]


@given(st.sampled_from(LEAVES), st.sampled_from(LEAVES))
def test_of_two_differences_the_first_in_model_order_is_found(
    one: tuple[Any, ...], other: tuple[Any, ...]
) -> None:
    changed = planted(one)
    both = copy.deepcopy(changed)
    place: Any = both
    for part in other[:-1]:
        place = place[part]
    place[other[-1]] = "planted"
    found = first_difference(DUMP, both)
    assert found is not None
    assert found[0] == dotted(min(one, other, key=LEAVES.index))


def test_first_difference_of_shapes() -> None:
    assert first_difference(DUMP, DUMP) is None
    assert first_difference({"a": [1]}, {"a": [1, 2]}) == ("a.length", 1, 2)
    assert first_difference({"a": 1}, {"a": 1, "b": 2}) == ("b", None, 2)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of pydantic: the change may be illegal
@given(st.sampled_from(LEAVES))
def test_the_digest_depends_on_every_field_but_the_prediction(path: tuple[Any, ...]) -> None:
    def build(data: Any) -> Any:  # without validation: the change may be illegal
        kinds = {
            name: type(getattr(PLAN, name)) for name in ("placement", "routes", "shape", "schedule")
        }
        parts = {name: kind.model_construct(**data[name]) for name, kind in kinds.items()}
        return LaunchPlan.model_construct(**data | parts)

    assert build(DUMP).digest() == PLAN.digest()
    assert (build(planted(path)).digest() == PLAN.digest()) == (path[0] in PREDICTED)


def test_the_digest_is_stable() -> None:
    """The same on every machine and in every process; it changes only when the model does."""
    again = LaunchPlan.model_validate(dict(reversed(DUMP.items())))
    assert again.digest() == PLAN.digest()
    assert len(PLAN.digest()) == 64


class Mine(Schedule):
    """Stands for a backend's part."""

    kind: str = "tests.mine"
    depth: int = 2


class Other(Schedule):
    kind: str = "tests.other"
    depth: int = 2


def test_a_backends_part_is_in_the_digest_and_keeps_its_class_through_json() -> None:
    made = PLAN.model_copy(update={"schedule": Mine()})
    read = LaunchPlan.model_validate_json(made.model_dump_json())
    assert read.part(Mine) == Mine(depth=2)
    assert read == made
    digests = {PLAN.digest(), made.digest()}
    for part in (Mine(depth=3), Other()):
        digests.add(PLAN.model_copy(update={"schedule": part}).digest())
    assert len(digests) == 4


def test_a_part_that_is_not_the_backends_is_refused() -> None:
    with pytest.raises(TypeError, match="no Other; plan with the backend's `schedule`"):
        PLAN.model_copy(update={"schedule": Mine()}).part(Other)
    dump = {**DUMP, "schedule": {"kind": "nobody.knows", "depth": 2}}
    with pytest.raises(ValidationError, match=r"schedules of kind 'nobody\.knows'"):
        LaunchPlan.model_validate(dump)
    dump["schedule"] = {"kind": "tests.mine", "deep": 2}
    with pytest.raises(ValidationError, match="deep"):
        LaunchPlan.model_validate(dump)


def test_a_copy_has_its_own_digest() -> None:
    before = PLAN.digest()
    assert PLAN.model_copy(update={"nic": "efa"}).digest() != before
    assert PLAN.model_copy().digest() == before == PLAN.digest()
    fewer = PLAN.routes.model_copy(update={"classes": PLAN.routes.classes[1:]})
    assert PLAN.model_copy(update={"routes": fewer}).digest() != before


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("placement", "sites", 0, "nodes"), [[1, 1]], "every node once"),
        (("placement", "sites", 0, "nodes"), [[0, 0], [2, 2]], "placement is of 3 nodes x 2"),
        (("placement", "sites", 0, "seats"), [], "at least one"),
        (("routes", "classes", 0, "dst_local"), 0, "every ordered pair"),
        (("routes", "classes", 0, "pairs"), 2, "every ordered pair"),
        (("shape", "m"), 2047, "not a multiple"),
        (("routes", "classes", 0, "kind"), "nic", "with 0 rails"),
        (("routes", "classes", 1, "rails"), [], "with 0 rails"),
        (("routes", "classes", 1, "src_relay"), 1, "relays 1"),
        (("nics",), None, "has the NIC schedule None"),
        (("nics", "queue_pairs"), 0, "greater than or equal to 1"),
        (("routes", "classes", 0, "bandwidth_gbs"), 0, "greater than 0"),
        (("schema_version",), 2, "2 is of another version of mkernel"),
        (("extra",), 1, "Extra inputs"),
    ],
)
def test_a_broken_plan_file_is_refused(path: tuple[Any, ...], value: Any, message: str) -> None:
    changed = copy.deepcopy(DUMP)
    place: Any = changed
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(ValidationError, match=message):
        LaunchPlan.model_validate(changed)


def test_route_looks_up_every_pair_and_nothing_else() -> None:
    for src in range(4):
        for dst in range(4):
            if src != dst:
                assert (PLAN.route(src, dst).src, PLAN.route(src, dst).dst) == (src, dst)
    for src, dst in ((0, 0), (-1, 0), (0, 4)):
        with pytest.raises(KeyError):
            PLAN.route(src, dst)


def test_models_are_frozen() -> None:
    with pytest.raises(ValidationError):
        PLAN.nic = "efa"  # type: ignore[misc]


def test_a_half_named_rail_is_refused() -> None:
    with pytest.raises(ValidationError, match="dst_nic"):
        Rail.model_validate({"src_nic": "a", "bandwidth_gbs": 1})


def test_topology_wants_nodes_in_order() -> None:
    node = {"id": 1, "hostname": "h", "numa": []}
    with pytest.raises(ValidationError, match=r"expected 0 to 0 in order"):
        Topology.model_validate({"nodes": [node]})
