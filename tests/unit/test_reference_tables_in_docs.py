"""Tables of the documentation name what the code has: every claim, and every setting's default."""

from __future__ import annotations

import re
from pathlib import Path

from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.settings import NicSettings

DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str, heading: str) -> list[tuple[list[str], str]]:
    """Of the table below a heading: names in the first cell, and the second cell."""
    section = (DOCS / page).read_text().partition(f"{heading}\n")[2].partition("\n#")[0]
    cells = re.findall(r"^\| (`.+?) \| (.+?) \|", section, re.MULTILINE)
    return [(re.findall(r"`(\w+)`", names), second) for names, second in cells]


def test_every_claim_is_explained() -> None:
    named = [name for names, _ in rows("writing-a-backend.md", "### Claims") for name in names]
    assert sorted(named) == sorted(AcceleratorCapabilities.model_fields)


def test_nic_settings_have_the_defaults_that_the_page_gives() -> None:
    found = rows("nics.md", "## Settings")
    assert found
    for names, defaults in found:
        given = dict(zip(names, defaults.split(", "), strict=False))
        for name, default in given.items():
            value = NicSettings.model_fields[name].default
            assert default == str(value) or (value is None and not default.isdecimal()), name
