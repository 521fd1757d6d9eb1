"""Conversion of text of any origin for display: what a terminal would act on is shown instead."""

from __future__ import annotations


def printable(text: str, most: int | None = None) -> str:
    r"""Return ``text`` on one line: control characters, line breaks, bidirectional overrides and all
    else that has no glyph become escapes (``\x1b``). Printable text stays as it is, so it may be
    applied twice.

    Args:
        most: longer text is cut to this many characters, followed by its full length.
    """
    cut = text if most is None or len(text) <= most else text[:most]
    shown = cut if cut.isprintable() else "".join(map(_shown, cut))
    return shown if cut is text else f"{shown}… ({len(text)} characters)"


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


def one_line(error: BaseException, most: int = 300) -> str:
    """Return an error's text in one line; its type if it has none."""
    return " ".join(str(error).split())[:most] or type(error).__name__
