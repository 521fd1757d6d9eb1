"""Entry points are looked up again when packages come and go, and not before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from in_world import DEADLINE_S

from mkernel import installed

GROUP = "mkernel.accelerators"


def install(folder: Path, name: str) -> Path:
    package = folder / f"{name}-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {name}:Backend\n")
    return package


def names() -> set[str]:
    return {point.name for point in installed.points(GROUP)}


def test_what_is_installed_or_removed_is_seen_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = names()
    assert shipped >= {"streams", "hopper", "ascend"}
    assert "first" not in shipped
    monkeypatch.syspath_prepend(str(tmp_path))
    assert names() == shipped
    packages = []
    for second, name in enumerate(("first", "second")):
        packages.append(install(tmp_path, name))
        os.utime(tmp_path, (second, second))  # a file system's clock may stand for milliseconds
        assert names() == {*shipped, "first", name}
    shutil.rmtree(packages[0])
    os.utime(tmp_path, (3, 3))
    assert names() == {*shipped, "second"}
    sys.path.remove(str(tmp_path))
    assert names() == shipped


def test_the_working_directory_is_a_folder_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "here")
    monkeypatch.syspath_prepend("")
    assert "here" not in names()
    monkeypatch.chdir(tmp_path)
    assert "here" in names()


def test_nothing_is_looked_up_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    found = installed.points(GROUP)
    monkeypatch.setattr(installed, "entry_points", None)
    assert installed.points(GROUP) is found


PROGRAM = """
import gc
import sys

import mkernel
from mkernel import installed

def found():
    looks = installed._of_group.cache_info().misses
    objects = gc.get_freeze_count(), len(gc.get_objects())
    return "mkernel.before_fork" in sys.modules, looks, gc.isenabled(), *objects

if __name__ == "__main__":
    print(*mkernel.launch(found, accelerator="streams", timeout_s=240)[0])
"""


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what a rank of a program of its own found. In this process the path may have one more
    folder of packages than the server's: setuptools adds its own, and Inductor imports it in tests
    before."""
    script = tmp_path_factory.mktemp("program") / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.multiprocess
def test_ranks_have_what_was_found_before_they_were_forked(rank: list[str]) -> None:
    """That is one look for each of the two groups, and a rank takes none of its own."""
    assert rank[:2] == ["True", "2"]


@pytest.mark.multiprocess
def test_ranks_look_for_garbage_among_their_own_objects_alone(rank: list[str]) -> None:
    """What they were forked with, torch among it, is most of what there is."""
    enabled, frozen, own = rank[2:]
    assert enabled == "True"
    assert int(frozen) > 10 * int(own)
