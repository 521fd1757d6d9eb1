"""`mkernel doctor --report`: what a report of a defect needs, and nothing that is private."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mkernel import bug_report, failure_record
from mkernel.bug_report import BugReport
from mkernel.cli.main import app as command_line
from mkernel.errors import ArgumentError, WorldError
from mkernel.settings import MASK
from mkernel.world.failure import FailureMonitor
from mkernel.world.watchdog import Notice

SECRET = "0123456789abcdef-a-secret"


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(failure_record, "path", lambda: tmp_path / "kept" / "last-failure.json")
    return tmp_path


@pytest.fixture
def app() -> typer.Typer:
    return command_line


def report(app: typer.Typer, file: Path) -> BugReport:
    done = CliRunner().invoke(app, ["doctor", "--report", str(file)])
    assert done.exit_code == 0, done.output
    assert "Read it before you attach it" in " ".join(done.output.split())
    return BugReport.model_validate(json.loads(file.read_text()))


def test_it_has_versions_devices_settings_topology_and_the_last_failure(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_TIMEOUT_S", "7")
    failure_record.keep({"failure": {"message": "rank 1 died"}})
    found = report(app, tmp_path / "report.json")
    assert {"mkernel", "python", "torch", "kernel"} <= set(found.versions)
    assert {row.kind for row in found.devices} >= {"accelerator", "nic", "library", "auto"}
    assert isinstance(found.settings, dict)
    timeout = found.settings["MKERNEL_TIMEOUT_S"]
    assert (timeout.value, timeout.source) == (7.0, "environment")
    assert isinstance(found.topology, dict)
    assert found.topology["nodes"][0]["numa"]
    assert found.last_failure == {"failure": {"message": "rank 1 died"}}


def test_it_shows_no_secret_and_nobodys_name(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = "/home/somebody-of-note"
    monkeypatch.setenv("MKERNEL_JOB_SECRET", SECRET)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("NCCL_TOKEN_OF_MINE", SECRET)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("MKERNEL_NIC_SETTINGS__SOFT_LIBRARY", f"{home}/lib.so")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-17.example")
    failure_record.keep({"failure": {"message": "rank 1 on gpu-17.example died"}})
    found = report(app, tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert SECRET not in text
    assert "somebody-of-note" not in text
    assert "gpu-17.example" not in text
    assert found.environment["OMP_NUM_THREADS"] == "3"
    assert isinstance(found.settings, dict)
    assert found.settings["MKERNEL_JOB_SECRET"].value == MASK
    assert found.settings["MKERNEL_NIC_SETTINGS__SOFT_LIBRARY"].value == "~/lib.so"
    assert found.last_failure == {"failure": {"message": "rank 1 on host died"}}


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        ('{"x":' + "[" * 300 + "]" * 300 + "}", "lie in each other more than 32 deep"),
        ("[" * 20000, "recursion"),
        ('{"x": "\\ud800"}', "surrogates"),
        ("[]", "holds no record"),
    ],
    ids=["deep", "deeper", "half a character", "no object"],
)
def test_a_record_that_cannot_be_shown_is_left_out(kept: str, why: str) -> None:
    """Found by fuzzing: the report itself could not be written."""
    failure_record.keep({})
    failure_record.path().write_text(kept)
    found = json.loads(bug_report.collect("no machine").model_dump_json())
    assert re.fullmatch(f"cannot be read: .*{why}.*", found["last_failure"])


def test_what_cannot_be_had_is_said(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_TIMEOUT_S", "soon")
    failure_record.keep({})
    failure_record.path().write_text("no json")
    found = bug_report.collect("no machine")
    assert isinstance(found.settings, str)
    assert "MKERNEL_TIMEOUT_S" in found.settings
    assert isinstance(found.last_failure, str)
    assert found.last_failure.startswith("cannot be read")
    with pytest.raises(ArgumentError, match="--report"):
        CliRunner().invoke(
            app, ["doctor", "--report", str(tmp_path)], catch_exceptions=False
        )  # a folder
    with pytest.raises(ArgumentError, match="nothing beside"):
        CliRunner().invoke(app, ["doctor", "--report", "x", "--json"], catch_exceptions=False)


def test_without_a_failure_there_is_none() -> None:
    assert failure_record.last() is None


def test_only_the_user_reads_it_and_it_is_kept_nowhere_else(tmp_path: Path) -> None:
    file = failure_record.keep({"number": 1})
    failure_record.keep({"number": 2})
    assert failure_record.last() == {"number": 2}
    assert file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    file.parent.chmod(0o777)
    with pytest.raises(PermissionError):
        failure_record.keep({"number": 3})
    with pytest.raises(PermissionError):
        failure_record.last()


class NoStore:
    """A store that takes what it is told."""

    def __getattr__(self, name: str) -> object:
        return lambda *_, **__: b""


def broken(kind: str) -> FailureMonitor:
    monitor = FailureMonitor(0, 2, 5.0, (NoStore(), NoStore()), bytes(32))  # type: ignore[arg-type]
    monitor.about = {"world": "test"}
    monitor.take(Notice(kind, 1, "rank 1 died", {}))  # type: ignore[arg-type]
    return monitor


def test_a_failures_message_says_where_it_is_kept() -> None:
    with pytest.raises(WorldError) as caught:
        broken("PeerFailure").raise_if_broken()
    assert str(caught.value).startswith("rank 1 died (kept for `mkernel doctor --report`: ")
    assert str(failure_record.path()) in str(caught.value)
    kept = failure_record.last()
    assert kept is not None
    assert (kept["world"], kept["rank"], kept["size"]) == ("test", 0, 2)
    assert kept["failure"]["message"] == "rank 1 died"


def test_what_the_user_wanted_is_no_failure() -> None:
    with pytest.raises(WorldError, match=r"^rank 1 died$"):
        broken("Cancelled").raise_if_broken()
    assert failure_record.last() is None


def test_where_it_cannot_be_kept_the_failure_is_raised_all_the_same(own_folder: Path) -> None:
    (own_folder / "kept").write_text("in the way")
    with pytest.raises(WorldError, match=r"^rank 1 died \(no record of it: "):
        broken("PeerFailure").raise_if_broken()
