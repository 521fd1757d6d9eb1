"""Backends of third parties: installed from a folder, found by entry point, judged by the kit.

The packages are those that docs/writing-a-backend.md walks through.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kept_subject import IN_NEW_PROCESSES, Kept
from once import once

from mkernel.conformance.accelerator import AcceleratorSubject, accelerator_checks
from mkernel.conformance.check import Check, run_check

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "writing-a-backend.md"
SOURCES = ROOT / "examples" / "plugins"
MODULES = [
    SOURCES / "tiny_accelerator" / "tiny_accelerator.py",
    SOURCES / "tiny_nic" / "tiny_nic.py",
]
NOT_CLAIMED_BY_TINY = {
    "chunk-invariance", "split-invariance", "split-attention", "replicas", "routing", "activations",
    "expert-order",
    "combine-weights", "combine-order", "drawn-routings", "handles", "causal", "gqa", "lse",
    "extreme-scores", "documents", "drawn-attention", "queued-calls", "scales", "sum-order",
    "norms",
}  # fmt: skip

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def installed(folder: Path) -> Path:
    """Where both packages are, once pip has installed them."""
    copies = folder / "sources"  # building leaves files beside the sources
    shutil.copytree(SOURCES, copies, ignore=shutil.ignore_patterns("__pycache__"))
    site = folder / "site"
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    packages = [str(copies / "tiny_accelerator"), str(copies / "tiny_nic")]
    subprocess.run(
        [sys.executable, "-m", "pip", *install, "--target", str(site), *packages],
        check=True,
        cwd=folder,
    )
    return site


@pytest.fixture(scope="module")
def mkernel_cli(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """``mkernel`` where both packages are installed."""
    folder = tmp_path_factory.mktemp("plugins")
    site = once(request, lambda: installed(folder))
    limited = str(Path(__file__).with_name("limited_plugins"))
    path = os.pathsep.join(filter(None, [str(site), limited, os.environ.get("PYTHONPATH")]))

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mkernel", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "400"},
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )

    return call


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Check → outcome, from the JSON on stdout."""
    assert done.returncode == 0, done.stdout + done.stderr
    return {each["name"]: each["outcome"] for each in json.loads(done.stdout)["results"]}


CHECKS = accelerator_checks()


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_the_tiny_accelerator_passes_the_kit(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SOURCES / "tiny_accelerator")
    kind = AcceleratorSubject if check.name in IN_NEW_PROCESSES else Kept
    result = run_check(check, kind("tiny_accelerator:TinyAccelerator", quick=True))
    expected = "skipped" if check.name in NOT_CLAIMED_BY_TINY else "passed"
    assert result.outcome == expected, result.message


def test_most_of_the_kit_judges_the_tiny_accelerator() -> None:
    assert {check.name for check in CHECKS} > NOT_CLAIMED_BY_TINY
    assert len(CHECKS) > 2 * len(NOT_CLAIMED_BY_TINY)


def test_the_kit_judges_what_is_installed(mkernel_cli: Cli) -> None:
    chosen = ("--check", "dtypes", "--check", "views", "--check", "replicas")
    found = outcomes(
        mkernel_cli("conformance", "--accelerator", "tiny", "--quick", "--json", "-", *chosen)
    )
    assert found == {"dtypes": "passed", "views": "passed", "replicas": "skipped"}


def test_the_tiny_nic_passes_the_kit(mkernel_cli: Cli) -> None:
    found = outcomes(mkernel_cli("conformance", "--nic", "tinynic", "--quick", "--json", "-"))
    assert [name for name, outcome in found.items() if outcome == "skipped"] == ["device-faults"]


def test_ops_run_on_the_tiny_accelerator(mkernel_cli: Cli) -> None:
    done = mkernel_cli(
        "run", "all_gather_gemm", "--accelerator", "tiny", "--nodes", "1", "--ranks-per-node", "2",
        "--m", "64", "--k", "64", "--n", "64",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout


def test_the_kernels_of_one_push_into_the_fifo_of_the_other(mkernel_cli: Cli) -> None:
    done = mkernel_cli(
        "run", "all_gather_gemm", "--accelerator", "tiny", "--nic", "tinynic", "--verbs", "sockets",
        "--nodes", "2", "--ranks-per-node", "2", "--m", "64", "--k", "64", "--n", "64",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"PASSED .*, 4 ranks, \d+ kB through the NIC", done.stdout)


def test_an_op_that_it_lacks_is_refused_with_who_has_it(mkernel_cli: Cli) -> None:
    done = mkernel_cli("run", "ring_attention", "--accelerator", "tiny", "--nodes", "1")
    assert done.returncode == 2, done.stdout + done.stderr
    for part in ("'tiny' does not provide 'ring_attention'", "ascend", "--accelerator streams "):
        assert part in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--accelerator", "limited:OneNode"], "accelerator 'limited:OneNode' has no path between"),
        (
            ["--accelerator", "tiny", "--nic", "limited:HostOnly", "--verbs", "sockets"],
            "nic 'limited:HostOnly' takes puts from the host only",
        ),
        (["--accelerator", "tinny"], "tiny"),
        (["--accelerator", "tiny_nic:TinyNic"], "derives from AcceleratorBackend"),
    ],
    ids=["no-path", "no-fifo", "unknown-name", "other-kind"],
)
def test_what_does_not_fit_is_refused(options: list[str], words: str, mkernel_cli: Cli) -> None:
    sizes = ["--m", "64", "--k", "64", "--n", "64"]
    world = ["--nodes", "2", "--ranks-per-node", "1"]
    done = mkernel_cli("run", "all_gather_gemm", *options, *world, *sizes)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_backend_needs_no_entry_point(mkernel_cli: Cli) -> None:
    found = outcomes(
        mkernel_cli(
            "conformance", "--nic", "tiny_nic:TinyNic", "--check", "sizes", "--quick", "--json", "-"
        )
    )
    assert found == {"sizes": "passed"}


def blocks() -> list[str]:
    """The guide's pieces of Python."""
    return re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_guide_shows_the_code_that_runs() -> None:
    """Every piece is in a module as it stands, and together the pieces are the modules."""
    sources = [module.read_text() for module in MODULES]
    for block in blocks():
        assert any(block in source for source in sources), f"not in a module:\n{block}"
    shown = [line for block in blocks() for line in block.splitlines() if line.strip()]
    code = [line for source in sources for line in source.splitlines() if line.strip()]
    assert shown == code


def test_the_guide_shows_the_entry_points() -> None:
    found = re.findall(r"^```toml\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    metadata = "".join(path.read_text() for path in SOURCES.glob("*/pyproject.toml"))
    for block in found:
        assert block in metadata
