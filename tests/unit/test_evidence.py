"""Checks what result files and pages report of commits and seeds against the history."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mkernel.harness import draws, gains, results

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

import ways  # noqa: E402

RESULTS = ROOT / "bench/results"
MACHINE = "backends/accelerators/cuda/machine.json"
MACHINE_BEFORE = "backends/accelerators/hopper/machine.json"
"""The same file has this place at commits until 7d9b488d."""
HASH = re.compile(r"(?<![\w./-])(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}(?![\w-])")
LOST = re.compile(r"^Not in this history, .*?: (.*)$", re.MULTILINE)
"""A page's line that names commits which cannot be looked up here, and why."""

FILES = [path.relative_to(RESULTS).as_posix() for path in sorted(RESULTS.rglob("*.json"))]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted(
        [
            *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md"),
            *ROOT.glob("examples/**/*.md"), *ROOT.glob("tests/**/*.md"),
        ]
    )
]  # fmt: skip


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@cache
def history() -> tuple[str, ...]:
    """HEAD and all its ancestors; none where this is no clone, or one that is cut off."""
    if (
        not (ROOT / ".git").exists()
        or git("rev-parse", "--is-shallow-repository").stdout != "false\n"
    ):
        return ()
    return tuple(git("rev-list", "HEAD").stdout.split())


@pytest.fixture
def commits() -> tuple[str, ...]:
    if not history():
        pytest.skip("there is no whole git history here: commits cannot be looked up")
    return history()


def known(commit: str, commits: tuple[str, ...]) -> bool:
    return any(each.startswith(commit) for each in commits)


def sources(content: Any) -> Iterator[dict[str, Any]]:
    """Every object of a result that names a commit."""
    if isinstance(content, dict):
        if isinstance(content.get("commit"), str):
            yield content
        content = list(content.values())
    if isinstance(content, list):
        for each in content:
            yield from sources(each)


@pytest.mark.parametrize("file", FILES)
def test_results_name_commits_of_this_history_or_say_that_theirs_is_lost(
    file: str, commits: tuple[str, ...]
) -> None:
    for source in sources(json.loads((RESULTS / file).read_text())):
        lost = source.get("commit_from") == "lost"
        assert known(source["commit"], commits) is not lost, source["commit"]


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_commits_of_this_history(page: str, commits: tuple[str, ...]) -> None:
    text = (ROOT / page).read_text()
    told = {each for line in LOST.findall(text) for each in HASH.findall(line)}
    if page == "docs/numbers.md":  # whose files say it
        found = (json.loads((RESULTS / file).read_text()) for file in FILES)
        told = {
            source["commit"][:12]
            for content in found
            for source in sources(content)
            if source.get("commit_from") == "lost"
        }
    unknown = {each for each in HASH.findall(text) if not known(each, commits)}
    assert unknown - told == set()
    assert {each for each in told if known(each, commits)} == set()


def test_results_are_summaries() -> None:
    """Single turns stay out of git: ``bench/results_file.py`` leaves them out."""
    assert sum(path.stat().st_size for path in RESULTS.rglob("*")) <= 2_000_000
    for file in FILES:
        report = results.read(RESULTS / file)
        for row in () if report is None else report.rows:
            assert not any(entry.seconds or entry.skew_us for entry in row.entries.values()), file


def test_no_result_lies_in_two_places() -> None:
    contents: dict[bytes, str] = {}
    for file in FILES:
        other = contents.setdefault((RESULTS / file).read_bytes(), file)
        assert other == file, f"{file} is a copy of {other}"


def test_the_readme_cites_the_newest_file_of_each_kind() -> None:
    series = gains.all_series(RESULTS)
    cited = re.findall(r"`(\w+)\.json`", (ROOT / "README.md").read_text())
    assert {each.file for each in series} >= set(cited)
    assert cited
    for file in cited:
        later = [gains.newer(each, series) for each in series if each.file == file]
        assert None in later, f"{file}: every row was measured again in {later[0].file}"  # type: ignore[union-attr]


# Seeds.


@cache
def random_files() -> dict[str, tuple[int, str]]:
    """Files of drawn shapes: seed and commit."""
    found = {
        one.file: (one.seed, one.commit)
        for one in ways.measured([RESULTS / "ways.json"])
        if one.seed is not None
    }
    for file in FILES:
        content = json.loads((RESULTS / file).read_text())
        spec = content.get("spec")
        if isinstance(spec, dict) and spec.get("source") == "random":
            found[file] = spec["seed"], content["provenance"]["commit"]
    return found


def test_seeds_of_files_that_constants_were_fitted_to_are_spent() -> None:
    source = json.dumps(json.loads((ROOT / MACHINE).read_text()))
    named = {int(seed) for text in re.findall(r"seeds? ([\d, and]+)", source)
             for seed in re.findall(r"\d+", text)}  # fmt: skip
    braces = re.findall(r"hopper_\w+_\{([\d,]+)\}", source)
    named |= {int(seed) for text in braces for seed in text.split(",")}
    named |= {seed for file, (seed, _) in random_files().items()
              if not file.endswith(".json") or Path(file).name in source}  # fmt: skip
    assert {7, 11, 17, 31, 32, 41} <= named
    assert named <= draws.SPENT.keys()


def constants(commit: str) -> Any:
    """Return the constants by which plans of GEMM ops, of which all drawn shapes are, were made at a
    commit, without the words."""

    def numbers(content: Any) -> Any:
        if isinstance(content, dict):
            return {name: numbers(each) for name, each in content.items()
                    if name not in ("source", "fitted_to")}  # fmt: skip
        return content

    shown = git("show", f"{commit}:{MACHINE}").stdout
    found = numbers(json.loads(shown or git("show", f"{commit}:{MACHINE_BEFORE}").stdout))
    found.pop("attention", None)
    return found


def test_a_seed_that_is_held_out_was_measured_once_and_after_the_last_fit(
    commits: tuple[str, ...],
) -> None:
    held_out = {file: run for file, run in random_files().items() if run[0] not in draws.SPENT}
    used = {seed: {commit for each, commit in held_out.values() if each == seed}
            for seed, _ in held_out.values()}  # fmt: skip
    for seed, measured in used.items():
        assert len(measured) == 1, f"seed {seed} was measured at {measured}: put it into SPENT"
        assert constants(*measured) == constants("HEAD"), (
            f"constants were changed after seed {seed} was measured: put it into SPENT and draw anew"
        )


def test_the_draws_that_are_made_next_are_of_seeds_that_are_not_spent() -> None:
    script = (ROOT / "bench/measure.sh").read_text()
    seeds = re.findall(r"^ +seed=\$\{SEED:-(\d+)\}$", script, re.MULTILINE)
    assert len({*seeds}) == 2  # of any number of rows, and of few
    assert not draws.SPENT.keys() & {int(seed) for seed in seeds}


def test_a_size_that_a_spent_seed_draws_is_known() -> None:
    for seed in draws.SPENT:
        shape = draws.drawn(60, seed, ("all_gather_gemm",), 2)[-1]
        assert draws.spent_sizes(2).get(shape.size) is not None
