"""Plans, topologies, constants and results say which version of their schema they have: another is
refused by that, whatever else it holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plan_worlds import make
from shipped import constants_of

from mkernel.cli.probe import discovered
from mkernel.errors import InputFileError
from mkernel.harness import gpu_tests, results
from mkernel.plan.model import LaunchPlan
from mkernel.probe.report import report
from mkernel.topology import discover
from mkernel.topology.cost import load_constants
from mkernel.version import __version__

sys.path.append(str(Path(__file__).parents[3] / "bench"))

import results_file

RESULTS = sorted(results_file.RESULTS.rglob("*.json"))

FORMATTED = {
    "result": ("hopper_gemm", "mkernel-bench", results.read),
    "tests on GPUs": ("gpu_tests", "mkernel-gpu-tests", gpu_tests.read),
    "figures": (
        "transfer",
        "mkernel-figures",
        lambda path: results_file.read(path.stem, path.parent),
    ),
}


def plan(path: Path) -> LaunchPlan:
    return LaunchPlan.from_file(path, "plan")


def a_plan() -> Any:
    return make().model_dump(mode="json")


def a_topology() -> Any:
    return discovered().topology.model_dump(mode="json")


def some_constants() -> Any:
    return constants_of("streams").model_dump(mode="json")


NUMBERED: dict[str, tuple[Callable[[], Any], Callable[[Path], object]]] = {
    "plan": (a_plan, plan),
    "topology": (a_topology, discover.read),
    "constants": (some_constants, load_constants),
}


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def of_another_version(content: Any, field: str, version: Any) -> Any:
    """As another version may write: fields that this one has not, and not all that this one has."""
    lasts = dict(list(content.items())[: len(content) // 2])
    return {"of another version": [1], **lasts, field: version}


OLD = sorted((Path(__file__).parents[2] / "data" / "schema_1").glob("*.json"))
"""Files as an earlier version of mkernel wrote them."""


def refusal(path: Path, read: Callable[[Path], object]) -> str:
    with pytest.raises(InputFileError) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert __version__ in str(refused.value)
    assert "make the file anew" in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("kind", NUMBERED)
@pytest.mark.parametrize("version", [0, 2, "1.1", 2**70, None])
def test_another_version_is_refused_by_it(tmp_path: Path, kind: str, version: Any) -> None:
    content, read = NUMBERED[kind]
    path = written(tmp_path / "x.json", of_another_version(content(), "schema_version", version))
    said = refusal(path, read)
    assert f"schema_version: {version!r} is of another version of mkernel" in said
    assert f"({__version__}) reads 1:" in said


@pytest.mark.parametrize("kind", NUMBERED)
def test_what_says_no_version_has_the_first(tmp_path: Path, kind: str) -> None:
    content, read = NUMBERED[kind]
    whole = content()
    assert next(iter(whole)) == "schema_version"  # errors come in the order of fields
    without = {name: value for name, value in whole.items() if name != "schema_version"}
    assert read(written(tmp_path / "x.json", without)) == read(
        written(tmp_path / "y.json", {**whole, "schema_version": 1})
    )


def test_a_report_of_a_machine_has_the_version_of_its_topology(tmp_path: Path) -> None:
    content = report(discovered()).model_dump(mode="json", by_alias=True)
    assert content["topology"]["schema_version"] == 1
    content["topology"]["schema_version"] = 2
    said = refusal(written(tmp_path / "x.json", content), discover.read)
    assert "schema_version: 2 is of another version" in said


def kept(told: Any, read: Any) -> bool:
    """Whether a model has all that a file told, whatever it has beside."""
    if isinstance(told, dict):
        return all(name in read and kept(value, read[name]) for name, value in told.items())
    if isinstance(told, list):
        return len(told) == len(read) and all(map(kept, told, read))
    return bool(told == read)


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_files_of_the_first_version_are_read_as_they_were_written(path: Path) -> None:
    """Where this fails the schema has changed: it needs another version, by which to refuse these."""
    _, read = NUMBERED[path.stem.partition("-")[0]]
    told = json.loads(path.read_text())
    assert told["schema_version"] == 1
    found: Any = read(path)
    model = getattr(found, "topology", found)
    assert kept(told, model.model_dump(mode="json"))


def test_what_a_file_told_and_a_model_has_not_is_noticed() -> None:
    assert {path.stem.partition("-")[0] for path in OLD} == NUMBERED.keys()
    plan = json.loads((OLD[0].parent / "plan-ascend-all_gather_gemm.json").read_text())
    assert kept(plan, {**plan, "new": 1})
    assert not kept({**plan, "gone": 1}, plan)
    assert not kept([plan, plan], [plan])
    schedule = {**plan["schedule"], next(iter(plan["schedule"])): "another"}
    assert not kept(plan, {**plan, "schedule": schedule})


@pytest.mark.parametrize("kind", FORMATTED)
@pytest.mark.parametrize("version", [0, 7])
def test_another_version_of_a_result_is_refused_by_it(
    tmp_path: Path, kind: str, version: int
) -> None:
    name, family, read = FORMATTED[kind]
    content = json.loads((results_file.RESULTS / f"{name}.json").read_text())
    assert content["format"] == f"{family}-1"
    path = written(
        tmp_path / "x.json", of_another_version(content, "format", f"{family}-{version}")
    )
    said = refusal(path, read)
    assert f"format: '{family}-{version}' is of another version of mkernel" in said
    assert f"'{family}-1'" in said


def test_figures_without_a_format_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "x.json", {"benchmark": "x", "figures": {}})
    with pytest.raises(InputFileError, match="format: None is of another version"):
        results_file.read("x", tmp_path)


def test_a_benchmark_writes_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    results_file.write("x", {"a": 1})
    assert results_file.read("x", tmp_path)["figures"] == {"a": 1}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_committed_result_is_read(path: Path) -> None:
    content = results_file.read(path.stem, path.parent)
    if content["format"] == results.FORMAT:
        assert results.read(path) is not None
    if content["format"] == gpu_tests.FORMAT:
        assert gpu_tests.read(path) is not None


def numbers(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where ``content`` has a number that is not whole."""
    if isinstance(content, dict):
        return [at for key, each in content.items() for at in numbers(each, (*path, key))]
    if isinstance(content, list):
        return [at for index, each in enumerate(content) for at in numbers(each, (*path, index))]
    return [path] if isinstance(content, float) else []


@pytest.mark.parametrize("kind", NUMBERED)
def test_an_infinite_number_is_refused(tmp_path: Path, kind: str) -> None:
    """JSON writes infinity as null, so that a file which was read could not be read again."""
    make, read = NUMBERED[kind]
    content = make()
    places = numbers(content)
    assert places
    for *path, last in places[:: len(places) // 20 + 1]:
        holder = content
        for key in path:
            holder = holder[key]
        kept, holder[last] = holder[last], float("inf")
        file = written(tmp_path / "file", content)
        file.write_text(file.read_text().replace("Infinity", "1e999"))
        with pytest.raises(InputFileError, match="finite number"):
            read(file)
        holder[last] = kept
