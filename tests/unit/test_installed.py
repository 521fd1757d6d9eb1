"""Entry points are looked up again when packages come and go, and not before."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from pathlib import Path

import pytest

import mkernel
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


def lookups() -> tuple[bool, int]:
    return "mkernel.before_fork" in sys.modules, installed._of_group.cache_info().misses


@pytest.mark.multiprocess
@pytest.mark.usefixtures("leaves_nothing")
def test_ranks_have_what_was_found_before_they_were_forked() -> None:
    """That is one look for each of the two groups, and a rank takes none of its own."""
    assert mkernel.launch(lookups, accelerator="streams") == [(True, 2)]


def collected() -> tuple[bool, int, int]:
    return gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects())


@pytest.mark.multiprocess
@pytest.mark.usefixtures("leaves_nothing")
def test_ranks_look_for_garbage_among_their_own_objects_alone() -> None:
    """What they were forked with, torch among it, is most of what there is."""
    ((enabled, frozen, own),) = mkernel.launch(collected, accelerator="streams")
    assert enabled
    assert frozen > 10 * own
