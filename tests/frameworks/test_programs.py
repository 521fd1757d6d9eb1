"""The programs for frameworks: each is run by something, and its page names what it ran with. ``make
test-frameworks`` runs them."""

from __future__ import annotations

import re
from pathlib import Path

import programs
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

import mkernel.nn
from mkernel.errors import ArgumentError
from mkernel.nn.transformers_plan import _style

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "frameworks"


def test_every_program_is_run() -> None:
    commands = " ".join(each for one in programs.FRAMEWORKS.values() for each in one.commands)
    found = {path.name for path in (ROOT / programs.EXAMPLES).iterdir() if path.is_file()}
    assert found == set(re.findall(rf"{programs.EXAMPLES}/(\S+)", commands)) | {"slurm.sbatch"}


@pytest.mark.parametrize("name", programs.FRAMEWORKS)
def test_pages_name_the_versions_that_ran(name: str) -> None:
    page = re.sub(r"-[\d.]+$", "", name)
    text = (PAGES / f"{page}.md").read_text()
    words = " ".join(programs.FRAMEWORKS[name].installs).split()
    pins = [word for word in words if not word.startswith("--")]
    assert [pin for pin in pins if "==" not in pin] == []
    assert [pin for pin in pins if pin not in text] == []
    version = next(pin.split("==")[1] for pin in pins if pin.startswith((page, f"{page}[")))
    (row,) = re.findall(
        rf"^\| .*\({page}\.md\) \| (.*?) \|", (PAGES / "index.md").read_text(), re.M
    )
    assert version in row.split(", ")


def test_the_page_has_every_style_of_transformers() -> None:
    """With what the plan makes of each name."""
    section = (
        (PAGES / "transformers.md").read_text().split("## Names of styles")[1].split("\n## ")[0]
    )
    rows = re.findall(r"^\| (`.*?) \| `(\w+\(.*?)`", section, re.MULTILINE)
    styles = {name: made for names, made in rows for name in re.findall(r"`(\w+)`", names)}
    with pytest.raises(ArgumentError) as refused:
        _style("a", "none", nn.Linear(1, 1))
    assert set(styles) == set(refused.value.legal.split(", "))
    experts = nn.Module()
    experts.gate_up_proj = nn.Parameter(torch.empty(1))
    for name, made in styles.items():
        if name == "replicate":
            continue
        expected = eval(made, {**vars(mkernel.nn), "Replicate": Replicate})
        found = _style("a", name, experts)
        assert type(found) is type(expected)
        assert vars(found) == vars(expected)
