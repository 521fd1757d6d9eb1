from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
from commands import run
from typer.testing import CliRunner

from mkernel import doctor
from mkernel.backends import registry
from mkernel.backends.contracts.status import Status
from mkernel.cli import doctor as command
from mkernel.cli.main import app
from mkernel.errors import ArgumentError, BackendUnavailable
from mkernel.settings import NicSettings, Settings
from mkernel.topology.placement import Pinning


class FakeAccelerator:
    def __init__(self, status: Status | Exception) -> None:
        self._status = status

    def status(self) -> Status:
        if isinstance(self._status, Exception):
            raise self._status
        return self._status

    def details(self) -> tuple[tuple[str, Status], ...]:
        return (("mode", Status(True, "off")),)

    def software(self, root: Path) -> tuple[tuple[str, Status], ...]:
        return (("SDK", self.status()),)


class FakeNic:
    providers: ClassVar[tuple[str, ...]] = ("system", "soft")

    def __init__(self, usable: tuple[str, ...] = (), broken: tuple[str, ...] = ()) -> None:
        self._usable, self._broken = usable, broken

    def status(self, verbs: str) -> Status:
        if verbs in self._broken:
            raise RuntimeError(f"{verbs}\n is broken")
        usable = verbs in self._usable
        return Status(usable, "here" if usable else "absent", "" if usable else "install it")

    def details(self, verbs: str) -> tuple[tuple[str, Status], ...]:
        return (("port 1", Status(True, "ACTIVE")),) if verbs == "soft" else ()


Install = Callable[[dict[str, Any], dict[str, Any]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replaces the installed backends: name → backend, or the exception that loading raises."""

    def put(accelerators: dict[str, Any], nics: dict[str, Any]) -> None:
        groups = {registry.ACCELERATORS: accelerators, registry.NICS: nics}

        def load(found: dict[str, Any], name: str) -> Any:
            if isinstance(found[name], Exception):
                raise found[name]
            return found[name]

        monkeypatch.setattr(registry, "names", lambda group: tuple(groups[group]))
        monkeypatch.setattr(registry, "accelerator", lambda name: load(accelerators, name))
        monkeypatch.setattr(registry, "nic", lambda name: load(nics, name))

    return put


GOOD = Status(True, "simulator, 2 threads")


def test_every_backend_and_provider_is_a_row(install: Install) -> None:
    install(
        {"ascend": FakeAccelerator(GOOD), "hopper": FakeAccelerator(Status(False, "no", "buy"))},
        {"cx7": FakeNic(usable=("soft",))},
    )
    report = doctor.examine()
    rows = {(row.kind, row.name): row for row in report.rows}
    assert rows["accelerator", "ascend"].usable
    assert rows["accelerator", "hopper"].remedy == "buy"
    assert rows["device", "hopper: mode"].detail == "off"
    assert rows["software", "SDK"].remedy == "buy"
    assert rows["nic", "cx7 on soft"].usable
    assert rows["fabric", "cx7 on soft: port 1"].detail == "ACTIVE"
    assert not rows["nic", "cx7 on system"].usable
    assert rows["nic", "cx7 on system"].remedy == "install it"
    assert {"library", "build", "cpu", "memory"} <= {kind for kind, _ in rows}
    assert report.healthy


@pytest.mark.parametrize(
    ("accelerators", "nics"),
    [
        ({"ascend": FakeAccelerator(Status(False, "no"))}, {"cx7": FakeNic(usable=("soft",))}),
        ({"ascend": FakeAccelerator(GOOD)}, {"cx7": FakeNic()}),
        ({}, {"cx7": FakeNic(usable=("soft",))}),
        ({"ascend": FakeAccelerator(GOOD)}, {}),
    ],
)
def test_unhealthy_without_an_accelerator_or_a_nic(
    install: Install, accelerators: dict[str, Any], nics: dict[str, Any]
) -> None:
    install(accelerators, nics)
    assert not doctor.examine().healthy


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ACCELERATOR", "foo"), ("NIC", "foo"), ("TIMEOUT_S", "abc"), ("NICC", "cx7")],
)
def test_what_commands_refuse_of_the_environment_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """As it said "ready to run" with an accelerator that is not installed."""
    assert not doctor.wrong_settings()
    monkeypatch.setenv(f"MKERNEL_{variable}", value)
    report = doctor.examine()
    row = report.rows[0]
    assert not report.healthy
    assert row.kind == "setting"
    assert row.remedy
    assert variable.lower() in row.detail.lower()


def test_whatever_fails_is_a_row(install: Install) -> None:
    install(
        {
            "gone": BackendUnavailable("'gone' is installed but does not import: x.so"),
            "odd": FakeAccelerator(ValueError()),
            "ascend": FakeAccelerator(GOOD),
        },
        {"cx7": FakeNic(usable=("soft",), broken=("system",)), "efa": SystemError("bad")},
    )
    report = doctor.examine()
    rows = {row.name: row for row in report.rows}
    assert "does not import: x.so" in rows["gone"].detail
    assert rows["odd"].detail == "ValueError"
    assert rows["cx7 on system"].detail == "system is broken"
    assert rows["cx7 on soft"].usable
    assert rows["efa"].detail == "bad"
    for name in ("gone", "odd", "cx7 on system", "efa"):
        assert not rows[name].usable
        assert rows[name].remedy
    assert report.healthy


def test_a_registry_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(group: str) -> Any:
        raise OSError("no metadata")

    monkeypatch.setattr(registry, "names", fail)
    report = doctor.examine()
    assert [row.detail for row in report.rows[:2]] == ["backends cannot be listed: no metadata"] * 2
    assert not report.healthy


def test_a_check_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> Any:
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "_compiler", fail)
    rows = {row.name: row for row in doctor.machine_rows(tmp_path)}
    assert (rows["C++ compiler"].usable, rows["C++ compiler"].detail) == (False, "no such thing")
    assert rows["libibverbs headers"].remedy == "install libibverbs-dev"
    header = tmp_path / "usr/include/infiniband/verbs.h"
    header.parent.mkdir(parents=True)
    header.touch()
    rows = {row.name: row for row in doctor.machine_rows(tmp_path)}
    assert rows["libibverbs headers"].usable


@mock.patch.dict(sys.modules)  # puts back what was imported, and nothing that is imported here
def test_pyverbs_is_had_by_a_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def seen() -> doctor.Row:
        for name in [each for each in sys.modules if each.partition(".")[0] == "pyverbs"]:
            del sys.modules[name]  # monkeypatch would put it back after all else
        importlib.invalidate_caches()
        (row,) = (row for row in doctor.machine_rows() if row.name == "pyverbs")
        return row

    paths = [each for each in sys.path if not Path(each, "pyverbs").exists()]
    monkeypatch.setattr(sys, "path", paths)
    gone = seen()
    assert (gone.usable, gone.kind) == (False, "library")
    assert "not installed" in gone.detail
    assert "python3-pyverbs" in gone.remedy

    package = tmp_path / "pyverbs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "device.py").write_text("raise ImportError('built for another Python')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *paths])
    broken = seen()
    assert not broken.usable
    assert "built for another Python" in broken.detail
    assert "python3-pyverbs" in broken.remedy

    (package / "device.py").write_text("")
    there = seen()
    assert (there.usable, there.remedy) == (True, "")
    assert str(package) in there.detail


def test_exit_codes_and_json(install: Install) -> None:
    install({"ascend": FakeAccelerator(GOOD)}, {"cx7": FakeNic(usable=("soft",))})
    text = run(command.command, "--json")
    assert doctor.Report.model_validate_json(text).healthy
    install({"ascend": FakeAccelerator(GOOD)}, {"cx7": FakeNic()})
    assert "cx7 on soft" in run(command.command, code=1)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [key for key in os.environ if key.upper().startswith("MKERNEL_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def sources(rows: list[doctor.SettingRow]) -> dict[str, str]:
    return {row.name: row.source for row in rows if row.source != "default"}


def test_every_setting_is_listed_with_its_meaning(clean: pytest.MonkeyPatch) -> None:
    rows = {row.name: row for row in doctor.setting_rows()}
    groups = {"nic_settings": NicSettings, "pinning": Pinning}
    wanted = set(Settings.model_fields) - set(groups)
    wanted |= {f"{group}.{name}" for group, model in groups.items() for name in model.model_fields}
    brought = {"streams_device", "streams_copies"}
    ascend = "strict races seed machine tile_m tile_n tile_k cube_cores comm_cores most_chunks"
    brought |= {f"ascend_{name}" for name in ascend.split()}
    of_cuda = ("multiprocessors", "link_gbs", "peer_access", "outputs", "tokens")
    brought |= {f"{name}_{each}" for name in ("cuda", "hopper") for each in of_cuda}
    brought |= {"hopper_attention"}
    assert set(rows) == wanted | brought
    assert all(row.description for row in rows.values())
    assert sources(list(rows.values())) == {}
    assert rows["nic_settings.qp_timeout"].environment == "MKERNEL_NIC_SETTINGS__QP_TIMEOUT"


def test_where_a_setting_came_from(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("MKERNEL_TIMEOUT_S", "5")
    clean.setenv("mkernel_nic_settings__fifo_slots", "64")
    clean.setenv("MKERNEL_NIC", "efa")
    rows = doctor.setting_rows(Settings(nic="cx7", verbs="system"))
    assert sources(rows) == {
        "timeout_s": "environment",
        "nic_settings.fifo_slots": "environment",
        "nic": "argument",
        "verbs": "argument",
    }
    values = {row.name: row.value for row in rows}
    assert (values["timeout_s"], values["nic_settings.fifo_slots"]) == (5.0, 64)
    assert values["nic"] == "cx7"


def test_a_group_given_as_one_value(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("MKERNEL_NIC_SETTINGS", '{"retry_count": 2}')
    assert sources(doctor.setting_rows()) == {"nic_settings.retry_count": "environment"}
    clean.delenv("MKERNEL_NIC_SETTINGS")
    given = Settings(nic_settings=NicSettings(retry_count=2))
    assert sources(doctor.setting_rows(given)) == {"nic_settings.retry_count": "argument"}


def test_secrets_never_show(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("MKERNEL_JOB_SECRET", "hunter2")
    for arguments in (("--settings",), ("--settings", "--json")):
        text = run(command.command, *arguments)
        assert "hunter2" not in text
        assert doctor.MASK in text
    rows = json.loads(run(command.command, "--settings", "--json"))["settings"]
    assert {row["source"] for row in rows if row["name"] == "job_secret"} == {"environment"}


def test_an_illegal_variable_is_named(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("MKERNEL_NIC_SETTINGS__QP_TIMEOUT", "99")
    with pytest.raises(ArgumentError, match=r"MKERNEL_NIC_SETTINGS__QP_TIMEOUT = '99'"):
        doctor.setting_rows()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_names_details_and_advice_are_whole_at_any_width(
    install: Install, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    advice = "load the card's driver and check `ls /sys/class/infiniband`, or use the soft provider"
    detail = "no RDMA device in /usr/lib/x86_64-linux-gnu/libibverbs.so.1 and none in another place"
    install(
        {"ascend": FakeAccelerator(GOOD), "hopper": FakeAccelerator(Status(False, detail, advice))},
        {"a-backend-with-a-long-name": FakeNic(usable=("soft",))},
    )
    monkeypatch.setenv("COLUMNS", str(width))
    shown = run(command.command)
    assert max(map(len, shown.splitlines())) <= width
    unbroken = "".join(shown.split())
    for row in doctor.examine().rows:
        told = f"{row.name}{row.detail}" + (f"→{row.remedy}" if row.remedy else "")
        assert "".join(told.split()) in unbroken


def test_nobody_hears_of_npus_who_has_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MKERNEL_ACCELERATOR", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    words = re.compile(r"CANN|torch_npu|npu-smi|NPU|by name only;|not ascend")
    said = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"}).stdout
    assert "ascend" in said, "the simulator is an installed backend"
    assert not words.search(said), said
    told = doctor.examine()
    assert {"CANN", "torch_npu", "npu-smi"} <= {row.name for row in told.rows if not row.asked}
    monkeypatch.setenv("MKERNEL_ACCELERATOR", "ascend")
    said = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"}).stdout
    assert "install CANN" in said


def test_what_backends_emulate_is_no_part_of_the_machine() -> None:
    said = CliRunner().invoke(app, ["probe"], env={"COLUMNS": "300"}).stdout
    lines = [line for line in said.splitlines() if "ascend-sim0" in line or "soft0" in line]
    assert len(lines) == 1
    assert "emulated by backends on the CPU: ascend-sim0, simulated A3" in lines[0]
