"""Which kit a command line asks for, and its exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from mkernel.conformance.accelerator import AcceleratorSubject, accelerator_checks
from mkernel.conformance.kit import kit_for, listed
from mkernel.errors import ArgumentError, BackendUnavailable, UnknownBackend
from mkernel.harness.outcome import CheckSkipped
from mkernel.topology.model import Accelerator

FAULTS = "mkernel.conformance.faults"
ONE_OP = f"{FAULTS}:HalfOfMoe"
"""A backend that claims one op, the dispatch."""


@pytest.fixture
def app() -> typer.Typer:
    from mkernel.cli.main import app

    return app


@pytest.mark.parametrize(("accelerator", "nic"), [(None, None), ("ascend", "cx7")])
def test_exactly_one_backend_is_judged(accelerator: str | None, nic: str | None) -> None:
    with pytest.raises(ArgumentError, match="expected one of them"):
        kit_for(accelerator, nic)


def test_verbs_are_for_nics() -> None:
    with pytest.raises(ArgumentError, match="--verbs"):
        kit_for("ascend", None, verbs="soft")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UnknownBackend):
        kit_for("nothing", None)
    with pytest.raises((UnknownBackend, BackendUnavailable)):
        kit_for(None, "nothing", verbs="soft")


def test_checks_have_names_of_their_own_and_can_be_chosen() -> None:
    names = [check.name for checks in listed(None, None).values() for check in checks]
    accelerators = [check.name for check in accelerator_checks()]
    assert len(set(accelerators)) == len(accelerators)
    assert set(accelerators) < set(names)
    kit = kit_for("ascend", None)
    assert [c.name for c in kit.only(["waits", "shapes", "waits"]).checks] == ["waits", "shapes"]
    with pytest.raises(ArgumentError, match="'nope'"):
        kit.only(["nope"])


def test_what_is_not_claimed_is_skipped() -> None:
    subject = AcceleratorSubject(ONE_OP)
    assert subject.claimed("ring_attention", "moe_dispatch_gemm") == ("moe_dispatch_gemm",)
    with pytest.raises(CheckSkipped, match="not claimed: ring_attention"):
        subject.claimed("ring_attention")


def test_sizes_keep_to_the_claimed_alignment() -> None:
    subject = AcceleratorSubject("ascend")
    assert subject.step("float16", "float32") == 8
    assert subject.step("float32") == 4
    assert subject.aligned(9) == 16


@pytest.mark.parametrize(
    ("devices", "shared", "largest", "of_four"),
    [
        (1, 1, None, None),
        (2, 1, (1, 2), (1, 2)),
        (4, 1, (1, 3), (1, 4)),
        (1, 2, (1, 2), (1, 2)),
        (2, 2, (1, 3), (1, 4)),
    ],
)
def test_worlds_fit_the_devices(
    devices: int,
    shared: int,
    largest: tuple[int, int] | None,
    of_four: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MKERNEL_RANKS_PER_DEVICE", str(shared))
    subject = of_gpus(devices, between_nodes=False)
    if largest is None:
        with pytest.raises(CheckSkipped, match="needs 2 devices"):
            subject.largest()
    else:
        assert subject.largest() == largest
        assert subject.worlds((1, 4), (2, 2)) == (of_four,)
    assert subject.worlds((1, 1), (1, 4))[0] == (1, 1)


def test_two_backends_are_judged_on_nodes_of_their_own() -> None:
    subject = AcceleratorSubject("ascend,streams", quick=True)
    subject.require_usable()
    claims = subject.capabilities
    assert claims.ops == ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "all_reduce")
    assert not claims.sums_in_rank_order
    assert subject.worlds((1, 1), (1, 3), (1, 4), (3, 2), (4, 1)) == ((1, 4), (3, 2), (4, 1))
    for world, wanted in (((1, 2), (2, 1)), ((1, 4), (2, 2)), ((3, 2), (2, 3)), ((4, 1), (4, 1))):
        found = subject.split(world)
        assert (found["nodes"], found["ranks_per_node"]) == wanted
        assert found["accelerator"] == "ascend+streams"
    alone = AcceleratorSubject("ascend").split((1, 3))
    assert alone == {"nodes": 1, "ranks_per_node": 3, "accelerator": "ascend"}


@pytest.mark.parametrize(("gpus", "room"), [((2, 0), 4), ((0, 3), 6), ((1, 4), 2), ((0, 0), None)])
def test_the_kind_with_fewest_devices_limits_worlds_of_two(
    gpus: tuple[int, int], room: int | None
) -> None:
    subject = AcceleratorSubject("hopper,streams")
    backends = [of_gpus(count, between_nodes=True).backends[0] for count in gpus]
    subject.__dict__["backends"] = tuple(backends)
    assert subject.room == room


def of_gpus(count: int, *, between_nodes: bool, quick: bool = False) -> AcceleratorSubject:
    """A subject that believes to have so many."""
    subject = AcceleratorSubject("hopper", quick)
    backend = SimpleNamespace(
        probe=lambda: tuple(
            Accelerator(id=f"cuda{i}", kind="cuda", name="H200", index=i) for i in range(count)
        ),
        capabilities=lambda: SimpleNamespace(too_many=lambda ranks: None),
    )
    subject.__dict__["backends"] = (backend,)
    subject.__dict__["between_nodes"] = between_nodes
    return subject


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("gpus", [2, 3, 4])
def test_where_nics_join_nodes_the_usual_worlds_have_both_kinds_of_paths(
    gpus: int, quick: bool
) -> None:
    worlds = of_gpus(gpus, between_nodes=True, quick=quick).usual_worlds()
    assert any(nodes > 1 for nodes, _ in worlds)
    assert any(ranks > 1 for _, ranks in worlds)
    assert all(nodes * ranks <= gpus for nodes, ranks in worlds)
    assert all(nodes == 1 for nodes, _ in of_gpus(gpus, between_nodes=False).usual_worlds())


def test_a_passing_check_gives_code_0_and_reports(app: typer.Typer, tmp_path: Path) -> None:
    junit = tmp_path / "report.xml"
    options = ["--accelerator", "ascend", "--check", "capabilities", "--json", "-"]
    done = CliRunner().invoke(app, ["conformance", *options, "--junit", str(junit)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["passed"] is True
    assert [result["name"] for result in found["results"]] == ["capabilities"]
    assert ElementTree.parse(junit).getroot()[0].attrib["tests"] == "1"


def test_a_failing_check_gives_code_1(app: typer.Typer) -> None:
    options = ["--accelerator", f"{FAULTS}:NoDevice", "--check", "capabilities"]
    done = CliRunner().invoke(app, ["conformance", *options])
    assert done.exit_code == 1
    assert "FAILED" in done.output
    assert "finds no device" in done.output


def test_nothing_but_skipped_checks_gives_code_1(app: typer.Typer) -> None:
    options = ["--accelerator", ONE_OP, "--check", "gqa"]
    assert CliRunner().invoke(app, ["conformance", *options]).exit_code == 1


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--accelerator", "ascend", "--nic", "cx7"],
        ["--accelerator", "nothing"],
        ["--accelerator", "ascend", "--check", "nope"],
        ["--accelerator", "ascend", "--verbs", "soft"],
        ["--accelerator", "ascend", "--json", "-", "--junit", "-"],
    ],
)
def test_bad_input_is_an_argument_error(app: typer.Typer, options: list[str]) -> None:
    done = CliRunner().invoke(app, ["conformance", *options])
    assert isinstance(done.exception, ArgumentError)  # the command's main gives code 2


def test_the_list_names_every_check(app: typer.Typer) -> None:
    done = CliRunner().invoke(app, ["conformance", "--list"], env={"COLUMNS": "160"})
    assert done.exit_code == 0
    for kind, checks in listed(None, None).items():
        for check in checks:
            assert re.search(rf"{kind} +{check.name} ", done.output), check.name


def test_the_planted_faults_of_one_check_are_a_table(app: typer.Typer) -> None:
    options = ["conformance", "--faults", "--check", "capabilities"]
    done = CliRunner().invoke(app, options, env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "ClaimsUnknownOp" in done.output
    assert "5 of 5 caught" in done.output
