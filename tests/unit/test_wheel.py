"""Tests what a wheel is made of, and what is installed from it beside what users write."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from once import once

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "examples" / "plugins"
DATA = {
    "mkernel/topology/data/links.json",
    "mkernel/topology/machines/dgx-h100.json",
    "mkernel/backends/accelerators/cuda/chips.json",
    *(f"mkernel/backends/accelerators/{b}/machine.json" for b in ("ascend", "cuda", "streams")),
}
HEADERS = {
    "mkernel/include/backends/contracts/call_starter.h",
    "mkernel/include/backends/transport/atomics.hpp",
    "mkernel/include/backends/transport/call_state.hpp",
    "mkernel/include/backends/transport/channel.hpp",
    "mkernel/include/backends/transport/host_device.hpp",
    "mkernel/include/backends/transport/clock.hpp",
    "mkernel/include/backends/transport/device_wait.cuh",
    "mkernel/include/backends/transport/host_control.hpp",
    "mkernel/include/backends/transport/signal.hpp",
    "mkernel/include/backends/transport/fifo_atomics.hpp",
    "mkernel/include/backends/transport/republish.hpp",
    "mkernel/include/backends/transport/fifo_device.hpp",
    "mkernel/include/backends/transport/fifo_host.hpp",
    "mkernel/include/backends/transport/fifo_slot.hpp",
    "mkernel/include/backends/transport/put_command.hpp",
    "mkernel/include/backends/transport/diagnosis.hpp",
    "mkernel/include/backends/transport/signal_pad.hpp",
    "mkernel/include/backends/transport/shared_word.hpp",
    "mkernel/include/backends/transport/sleep.hpp",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / "build" / "native" / "build.ninja").is_file(),
        reason="build/native has nothing to reuse: run make",
    ),
]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Return what a command prints; fail the test if the command fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "MKERNEL_TIMEOUT_S": "100", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, of the objects that are compiled already."""
    folder = tmp_path_factory.mktemp("wheel")

    def build() -> Path:
        how = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
        run(sys.executable, "-m", "pip", "wheel", *how, ".")
        (file,) = folder.glob("*.whl")
        return file

    return once(request, build)


def test_native_code_of_plug_ins_compiles_with_the_headers_of_a_wheel(
    wheel: Path, tmp_path: Path
) -> None:
    """A wheel's native code is modules and libraries, and the headers for plug-ins."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    kinds = {Path(name).suffix for name in names if not name.startswith("mkernel/include/")}
    assert kinds <= {".py", ".pyi", ".so", ".json", ".typed", ".txt", ""}, sorted(kinds)
    assert set(names) >= DATA
    assert not [name for name in names if name.endswith("CMakeLists.txt")]
    assert not [name for name in names if "planted" in name and name.endswith(".so")]
    assert {name for name in names if name.startswith("mkernel/include/")} == HEADERS

    # Both an installed mkernel and the repository say where the headers are.
    for folder, expected in ((tmp_path / "site", tmp_path / "site/mkernel/include"), (ROOT, ROOT)):
        told = run(sys.executable, "-m", "mkernel", "--include-dir", cwd=folder)
        assert told.strip() == str(expected)
        run(
            "g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
            f"-I{expected}", PLUGINS / "native" / "fifo_kernel.cpp", cwd=tmp_path,
        )  # fmt: skip


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An environment that has what this one has, but neither mkernel nor a way to a package index."""
    folder = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for entry in packages(Path(str(distribution("pip").locate_file("")))):
        (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def packages(site: Path) -> Iterator[Path]:
    """Yield the entries of a folder of packages, all but mkernel and what puts it on the path."""
    for entry in site.iterdir():
        if "mkernel" not in entry.name and entry.suffix != ".pth" and entry.name != "__pycache__":
            yield entry


def test_templates_of_plug_ins_install_this_project(
    wheel: Path, python: Path, tmp_path: Path
) -> None:
    """With their dependencies, where no stranger's package of a like name can be had; README's first
    program then runs in a clone in which nothing is built."""
    copies = shutil.copytree(
        PLUGINS, tmp_path / "plugins", ignore=shutil.ignore_patterns("__pycache__")
    )
    run(
        python, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-index",
        "--find-links", wheel.parent, copies / "tiny_accelerator", copies / "tiny_nic", cwd=tmp_path,
    )  # fmt: skip
    told = run(python, "-m", "mkernel", "plan", "ag_gemm", "--accelerator", "tiny", cwd=tmp_path)
    assert "on tiny" in told

    ignored = shutil.ignore_patterns("*.so", "*.?pp", "*.cu*", "__pycache__")
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "mkernel", clone / "mkernel", ignore=ignored)
    (block,) = re.findall(
        r'^```python title="first.py"\n(.*?)^```$', (ROOT / "README.md").read_text(), re.M | re.S
    )
    (clone / "first.py").write_text(block)
    assert "rank 1 of 2: [1024, 1024] by streams on cpu" in run(python, "first.py", cwd=clone)
