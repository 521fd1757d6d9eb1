"""Every link inside the documentation leads somewhere: to a file, and to a heading of it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from pages import PAGES, ROOT, SITE, name, prose

_LINK = re.compile(r"\]\(([^()\s]+(?:\([^()]*\))?)\)")
_HEADING = re.compile(r"^#+ (.+?)(?: \{#([\w-]+)\})?$", re.MULTILINE)
_SOURCE = re.compile(r"`([\w./-]+\.(?:py|cpp|hpp|cu|cuh|h))`")
_PATH = re.compile(r"`((?:backends|bench|docs|examples|mkernel|scripts|tests|topology)/[\w./-]+)`")


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and the site's generator make them."""
    found = set()
    for heading, given in _HEADING.findall(prose(page)):
        plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
        found |= {given or plain.replace(" ", "-"), re.sub(r"[-\s]+", "-", plain)}
    return found


def broken(page: Path, text: str) -> list[str]:
    """Links of a page that lead nowhere, with why."""
    found = []
    for link in _LINK.findall(re.sub(r"`[^`\n]*`", "", text)):
        if re.match(r"[a-z]+:", link):
            continue  # another host's
        where, _, anchor = link.partition("#")
        target = (page.parent / where).resolve() if where else page
        if not target.exists():
            found.append(f"{link}: no such file")
        elif page in SITE and ROOT / "docs" not in (target, *target.parents):
            found.append(f"{link}: not on the site; name the file instead")
        elif anchor and anchor not in anchors(target):
            found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, prose(page)) == []


@pytest.mark.parametrize(
    ("link", "says"),
    [
        ("[x](nothing.md)", "nothing.md: no such file"),
        ("[x](nics.md#no-such)", "nics.md#no-such: no such heading"),
        ("[x](../README.md)", "../README.md: not on the site; name the file instead"),
        ("[x](#the-trees)", "#the-trees: no such heading"),
    ],
)
def test_a_link_that_leads_nowhere(link: str, says: str) -> None:
    page = ROOT / "docs" / "architecture.md"
    assert broken(page, f"one line\n{link}") == [says]


@pytest.mark.parametrize(
    "link", ["[x](#the-tree)", "[x](nics.md#settings)", "![x](overview.svg)", "[x](https://a.b/c)"]
)
def test_a_link_that_leads_somewhere(link: str) -> None:
    assert broken(ROOT / "docs" / "architecture.md", link) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_exist(page: Path) -> None:
    missing = [
        path
        for path in _PATH.findall(prose(page))
        if not (ROOT / path).exists()
        and not (ROOT / path.removeprefix("mkernel/include/")).exists()  # an installation's
        and not list(ROOT.glob(f"{path.rstrip('.')}.*"))
    ]
    assert missing == []


@cache
def sources() -> frozenset[str]:
    """Paths of source files from the root, and every end of them that begins with a name."""
    found = set()
    for folder in ("backends", "bench", "examples", "mkernel", "scripts", "tests", "topology"):
        for file in (ROOT / folder).rglob("*.*"):
            parts = file.relative_to(ROOT).parts
            found |= {"/".join(parts[at:]) for at in range(len(parts))}
    return frozenset(found)


OUTSIDE = {"infiniband/verbs.h", "mkernel/include/backends/contracts/call_starter.h"}
"""Source files that pages name and that lie elsewhere: libibverbs', and an installation's."""


def unknown_sources(text: str) -> list[str]:
    """Source files that are named by the end of a path which no file of the project has."""
    return [name for name in _SOURCE.findall(text) if name not in sources() | OUTSIDE]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name)
def test_source_files_that_are_named_by_their_end_exist(page: Path) -> None:
    assert unknown_sources(prose(page)) == []


def test_a_source_file_that_is_gone_is_noticed() -> None:
    assert unknown_sources("`device/call.cuh`, `call.cuh`, `gone/call.cuh`") == ["gone/call.cuh"]
