"""Programs in a source tree without native modules, as README's first one after ``pip install .``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mkernel.unbuilt import DISTRIBUTION

ROOT = Path(__file__).parents[2]
PROGRAM = """
import mkernel, mkernel.backends.transport._transport as native, mkernel.settings as settings
print(mkernel.__file__, mkernel.backends.__file__, native.__file__, settings.__file__, sep="\\n")
print(mkernel.launch.__name__, mkernel.nn.__name__)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clone in which nothing is built."""
    ignored = shutil.ignore_patterns("*.so", "*.?pp", "*.cu*", "__pycache__")
    shutil.copytree(ROOT / "mkernel", tmp_path / "clone" / "mkernel", ignore=ignored)
    (tmp_path / "clone" / "Makefile").touch()
    (tmp_path / "clone" / "first.py").write_text(PROGRAM)
    return tmp_path / "clone"


def install(tree: Path, site: Path) -> Path:
    """A folder in which the mkernel of a tree is installed, as from a wheel."""
    site.mkdir()
    (site / "mkernel").symlink_to(tree / "mkernel")
    metadata = site / f"{DISTRIBUTION.replace('-', '_')}-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 1.0\n")
    return site


def run(tree: Path, site: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_program_in_it_runs_with_the_installed_modules(tree: Path, tmp_path: Path) -> None:
    site = install(ROOT, tmp_path / "site")
    done = run(tree, site, "first.py")
    assert done.returncode == 0, done.stderr
    *files, names = done.stdout.splitlines()
    assert len(files) == 4
    assert not [file for file in files if not file.startswith(f"{site}/mkernel/")]
    assert names == "launch mkernel.nn"
    done = run(tree, site, "-m", "mkernel", "--version")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "file", ["ops/all_reduce.py", "backends/accelerators/streams/machine.json", "added.py"]
)
def test_installed_modules_that_were_made_of_other_files_are_not_taken(
    tree: Path, tmp_path: Path, file: str
) -> None:
    site = install(ROOT, tmp_path / "site")
    with (tree / "mkernel" / file).open("a") as changed:
        changed.write("\n")
    done = run(tree, site, "first.py")
    assert done.returncode == 1
    assert (
        f"NotBuilt: mkernel in {tree} is not built for {sys.executable}: the mkernel that is "
        f"installed in {site} has another {file}; run `pip install .` in {tree} again, or the "
        "program in another folder"
    ) in done.stderr


def test_an_installation_without_modules_for_this_python_does_not_count(
    tree: Path, tmp_path: Path
) -> None:
    done = run(tree, install(tree, tmp_path / "site"), "first.py")
    assert done.returncode == 1
    assert f"run `make` in {tree}" in done.stderr
    assert "or run `pip install .` there with this Python" in done.stderr


def test_another_system_than_linux_is_named(tree: Path, tmp_path: Path) -> None:
    done = run(tree, tmp_path, "-c", "import sys; sys.platform = 'darwin'; import mkernel")
    assert done.returncode == 1
    assert "it runs on Linux only, and this is darwin" in done.stderr.splitlines()[-1]

    cmake = ["cmake", "-S", ROOT, "-B", tmp_path / "build", "-DCMAKE_SYSTEM_NAME=Darwin"]
    made = subprocess.run(cmake, capture_output=True, text=True, check=False)
    assert made.returncode != 0
    assert "mkernel runs on Linux only, and this is Darwin" in " ".join(made.stderr.split())
    assert "compiler" not in made.stdout  # none was looked for
