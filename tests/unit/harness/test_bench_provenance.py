"""What figures were taken on: the commit, and whether the tree was that commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mkernel.harness.provenance import provenance


def git(tree: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *who, *arguments], cwd=tree, check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with a source file and a file of results, all committed."""
    git(tmp_path, "init", "-q")
    for name in ("sub/source.py", "bench/results/x.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "all")
    return tmp_path


def test_a_clean_tree_is_its_commit(tree: Path) -> None:
    found = provenance(tree)
    assert found["commit"] == git(tree, "rev-parse", "HEAD")
    assert found["dirty"] is False


@pytest.mark.parametrize("change", ["changed", "staged", "removed"])
@pytest.mark.parametrize("where", [".", "sub"])
def test_a_change_to_a_tracked_file_is_dirty(tree: Path, change: str, where: str) -> None:
    """Whichever folder of the tree is asked from."""
    source = tree / "sub" / "source.py"
    source.write_text("2\n")
    if change == "removed":
        source.unlink()
        (source.parent / "new.py").write_text("1\n")  # the folder stays
    if change == "staged":
        git(tree, "add", "-A")
    assert provenance(tree / where)["dirty"] is True


def test_results_and_untracked_files_are_not(tree: Path) -> None:
    (tree / "bench" / "results" / "x.json").write_text("2\n")
    (tree / "new.py").write_text("1\n")
    assert provenance(tree)["dirty"] is False


def test_a_commit_that_is_said_is_taken(tree: Path) -> None:
    assert provenance(tree, "f" * 40)["commit"] == "f" * 40


def test_without_a_repository_the_commit_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance(tmp_path)["commit"] == "unknown"
