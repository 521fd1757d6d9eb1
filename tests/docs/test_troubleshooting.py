"""The page of troubleshooting has every error of mkernel, each with what it means and what to do."""

from __future__ import annotations

import inspect
import re

from pages import ROOT

from mkernel import errors

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def of_mkernel() -> set[str]:
    return {
        name
        for name, found in inspect.getmembers(errors, inspect.isclass)
        if issubclass(found, errors.MkernelError) and found is not errors.MkernelError
    }


def explained() -> dict[str, str]:
    """The text below the heading of each error."""
    parts = re.split(r"^### (\w+)\n", PAGE, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_error_is_there_once_and_no_other() -> None:
    assert len(re.findall(r"^### ", PAGE, re.MULTILINE)) == len(explained())
    assert set(explained()) == of_mkernel()


def test_each_says_what_it_means_and_what_to_do() -> None:
    short = [
        name
        for name, text in explained().items()
        if not text.startswith("*") or len(text.split("*", 2)[2].split()) < 8
    ]
    assert short == []


def test_what_ends_a_world_stands_below_its_base() -> None:
    for name in of_mkernel():
        ends_a_world = issubclass(getattr(errors, name), errors.WorldError)
        assert ends_a_world == (PAGE.index(f"### {name}\n") >= PAGE.index("### WorldError\n")), name
