"""The site builds without a warning, from every page, and has every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import ROOT, SITE, name

import mkernel
import mkernel.nn
from mkernel.settings import NicSettings, Settings

GENERATOR = ("mkdocs", "material", "mkdocstrings")


def documented(page: str) -> set[str]:
    """Names that the reference's page asks the generator for."""
    return set(re.findall(r"^::: (\S+)$", (ROOT / "docs/reference" / page).read_text(), re.M))


def test_every_public_name_is_in_the_reference() -> None:
    constants = {"__version__", "errors"}
    assert documented("index.md") == {f"mkernel.{n}" for n in set(mkernel.__all__) - constants} - {
        "mkernel.Settings"
    }
    assert documented("nn.md") == {f"mkernel.nn.{name}" for name in mkernel.nn.__all__}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "mkdocs.yml").read_text()
    assert [name(page) for page in SITE if str(page.relative_to(ROOT / "docs")) not in index] == []


@pytest.mark.skipif(
    not all(map(find_spec, GENERATOR)),
    reason="mkdocs-material and mkdocstrings[python] are not installed",
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=280, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stdout
    reference = (tmp_path / "reference" / "index.html").read_text()
    settings = (tmp_path / "reference" / "settings.html").read_text()
    for field in (*Settings.model_fields, *NicSettings.model_fields):
        assert f"{field.upper()}</code>" in settings or field == "nic_settings", field
    assert 'id="hopper_targets_h100_2"' in (tmp_path / "numbers.html").read_text()
    assert ":func:" not in reference
    for function in ("all_gather_gemm", "ring_attention", "init"):
        assert f'id="mkernel.{function}"' in reference
