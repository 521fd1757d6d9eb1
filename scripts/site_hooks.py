"""Hooks of mkdocs: what pages of the site have that no source has in this form."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mkernel.harness import numbers
from mkernel.settings import NicSettings, Settings
from mkernel.world.exposition import FAMILIES

RESULTS = Path("bench/results")
EVERY_RESULT = "<!-- every result -->"
TABLES: dict[str, tuple[type[BaseModel], str]] = {
    "settings": (Settings, "MKERNEL_"),
    "nic settings": (NicSettings, "MKERNEL_NIC_SETTINGS__"),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put tables of settings and of results where a page asks for them by a comment."""
    for name, (model, prefix) in TABLES.items():
        markdown = markdown.replace(f"<!-- table: {name} -->", "\n".join(table(model, prefix)))
    markdown = markdown.replace("<!-- table: metrics -->", "\n".join(metrics()))
    if EVERY_RESULT in markdown:
        markdown = markdown.replace(EVERY_RESULT, numbers.page(RESULTS).partition("\n")[2])
    return markdown


def table(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """A row for each variable that has a value of its own."""
    yield from ("| variable | default | meaning |", "|---|---|---|")
    for name, field in model.model_fields.items():
        if field.description:
            default = "" if field.default in (None, "") else f"`{field.default}`"
            meaning = field.description.replace("|", "\\|")
            yield f"| `{prefix}{name.upper()}` | {default} | {meaning} |"


def metrics() -> Iterator[str]:
    """A row for each metric of Prometheus' page."""
    yield from ("| metric | type | meaning |", "|---|---|---|")
    for name, (kind, told) in FAMILIES.items():
        yield f"| `mkernel_{name}` | {kind} | {told} |"


def on_page_content(html: str, **_: Any) -> str:
    """``:func:`launch```, a role of Sphinx in docstrings, becomes ``launch``."""
    return re.sub(r":(?:func|mod|class|meth|attr|data):<code>~?", "<code>", html)
