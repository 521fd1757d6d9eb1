"""docs/softverbs.md has every setting and every fault of the software device, and no others."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "softverbs.md").read_text()
CODE = (ROOT / "backends" / "nics" / "softverbs" / "config.cpp").read_text()


def rows(heading: str) -> set[str]:
    """First column of the table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def test_every_setting_is_there() -> None:
    assert rows("Settings") == set(re.findall(r'"MKERNEL_SOFTVERBS_(\w+)"', CODE))


def test_every_fault_is_there() -> None:
    assert rows("Faults") == set(re.findall(r'\{"([a-z-]+)", FaultKind::', CODE))
