"""What ``mkernel doctor`` says of an NPU's software, on made-up file systems."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import pytest

from mkernel import doctor
from mkernel.backends.accelerators.ascend import software

CANN = "usr/local/Ascend/ascend-toolkit/latest"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Whatever this machine has is not seen."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(software.metadata, "version", version)
    return monkeypatch


def tool(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    path.chmod(0o755)
    return path


def installed(home: Path, version: str) -> None:
    file = home / f"{platform.machine()}-linux/ascend_toolkit_install.info"
    file.parent.mkdir(parents=True)
    file.write_text(f"package_name=Ascend-cann-toolkit\nversion={version}\ninnerversion=V100\n")


def rows(root: Path) -> dict[str, doctor.Row]:
    found = {row.name: row for row in doctor.software_rows(root)}
    found.pop("nvcc", None)
    return found


def test_nothing_there(tmp_path: Path) -> None:
    found = rows(tmp_path)
    assert list(found) == ["CANN", "torch_npu", "npu-smi"]
    assert not any(row.usable for row in found.values())
    assert all("docs/ascend.md" in row.remedy for row in found.values())
    assert found["CANN"].detail == "not found; NPUs are simulated"
    assert found["npu-smi"].detail == "npu-smi not found; no driver; no /dev/davinci*"


def test_all_of_it(tmp_path: Path, bare: pytest.MonkeyPatch) -> None:
    home = tmp_path / CANN
    installed(home, "8.0.RC3")
    compiler = tool(home / "compiler/ccec_compiler/bin/bisheng")
    smi = tool(tmp_path / "usr/local/sbin/npu-smi")
    driver = tmp_path / "usr/local/Ascend/driver/version.info"
    driver.parent.mkdir(parents=True)
    driver.write_text("Version=24.1.0\nascendhal_version=7.35\n")
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    bare.setattr(software.metadata, "version", lambda name: "2.5.1")
    found = rows(tmp_path)
    assert all(row.usable and not row.remedy for row in found.values())
    assert found["CANN"].detail == f"8.0.RC3 in {home}; {compiler}"
    assert found["torch_npu"].detail == "2.5.1 (not imported here)"
    assert found["npu-smi"].detail == f"{smi}; driver 24.1.0; 2 devices (/dev/davinci*)"


def test_the_environment_comes_first(tmp_path: Path, bare: pytest.MonkeyPatch) -> None:
    installed(tmp_path / CANN, "7.0")
    mine = tmp_path / "mine"
    installed(mine, "8.2")
    bare.setenv("ASCEND_HOME_PATH", str(mine))
    assert rows(tmp_path)["CANN"].detail == f"8.2 in {mine}; no compiler"
    bare.setenv("ASCEND_HOME_PATH", str(tmp_path / "gone"))
    assert rows(tmp_path)["CANN"].detail.startswith("7.0 in")


def test_a_toolkit_without_a_version_and_a_driver_without_devices(tmp_path: Path) -> None:
    (tmp_path / CANN).mkdir(parents=True)
    driver = tmp_path / "usr/local/Ascend/driver/version.info"
    driver.parent.mkdir(parents=True)
    driver.write_bytes(os.urandom(64))
    found = rows(tmp_path)
    assert found["CANN"].detail.startswith("of unknown version")
    assert not found["npu-smi"].usable
