"""A package of somebody else that breaks as it is loaded or asked breaks nobody who did not name it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mkernel import doctor, selection
from mkernel.backends import registry
from mkernel.cli import probe
from mkernel.cli.main import app
from mkernel.errors import BackendUnavailable
from mkernel.machine import machine_topology
from mkernel.settings import Settings

ACCELERATOR = "from mkernel.backends.accelerators.streams import StreamsAccelerator as Base\n"
NIC = "from mkernel.backends.nics.cx7 import Cx7Nic as Base\n"
BREAKS = {
    "imports": "raise RuntimeError('broken as it is imported')",
    "exits": "import sys; sys.exit('broken as it is imported')",
    "is_made": "{base}class Plugin(Base):\n"
    "    def __init__(self): raise RuntimeError('broken as it is made')",
    "is_asked": "{base}class Plugin(Base):\n"
    "    preference = 0\n"
    "    def __getattribute__(self, name):\n"
    "        if name in ('kinds', 'preference', 'name', 'providers', '__class__', '__dict__'):\n"
    "            return super().__getattribute__(name)\n"
    "        raise RuntimeError('broken as it is asked')",
}


@pytest.fixture(params=BREAKS)
def broken(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Installs an accelerator and a NIC that break; how."""
    points = ""
    for kind, group, base in (
        ("accelerator", registry.ACCELERATORS, ACCELERATOR),
        ("nic", registry.NICS, NIC),
    ):
        module = f"stranger_{kind}_{request.param}"
        (tmp_path / f"{module}.py").write_text(BREAKS[request.param].replace("{base}", base))
        points += f"[{group}]\na_stranger = {module}:Plugin\n"
    package = tmp_path / "stranger-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"a_stranger", "cx7"} <= set(registry.names(registry.NICS))
    yield request.param
    for each in (registry.accelerator, registry.nic):
        each.cache_clear()
    for name in [name for name in sys.modules if name.startswith("stranger_")]:
        del sys.modules[name]


def test_who_does_not_name_it_goes_on(broken: str) -> None:
    settings = Settings()
    chosen = selection.backends(settings, 2, accelerator="ascend")
    assert chosen.nic in ("cx7", "efa")
    assert selection.backends(settings, 1).accelerator in ("streams", "hopper")
    assert machine_topology(chosen).nodes
    for words in (["plan", "ag_gemm"], ["plan", "ag_gemm", "--accelerator", "ascend"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        assert "stranger" not in done.output
    found = probe.discovered()
    assert {note.source for note in found.notes} >= {"accelerator a_stranger", "nic a_stranger"}


def test_doctor_reports_it(broken: str) -> None:
    report = doctor.examine()
    assert report.healthy
    rows = [row for row in report.rows if row.name.startswith("a_stranger")]
    assert {row.kind for row in rows} == {"accelerator", "nic"}
    for row in rows:
        assert not row.usable
        assert "broken as it is" in row.detail
    assert doctor.setting_rows()


def test_who_names_it_hears_why(broken: str) -> None:
    if broken == "is_asked":
        return
    for load in (registry.accelerator, registry.nic):
        with pytest.raises(BackendUnavailable, match=r"a_stranger.*broken as it is"):
            load("a_stranger")
