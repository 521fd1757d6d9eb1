"""Reader of XML files from outside, with limits.

It uses Python's own expat, not a hardened wrapper of it: a wrapper adds only the refusal of
entities, which is one handler here, while depth, elements and bytes must be limited in the same
handlers anyway.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from xml.parsers import expat

from mkernel.errors import InputFileError
from mkernel.topology.sources import pci

MOST_ELEMENTS = 50_000
MOST_DEPTH = 200
"""The limits of a file. The largest machines' files have some 10,000 elements and 30 levels."""


@dataclass
class Element:
    """One element, its line in the file, and its contents."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Pieces of the text between its tags."""

    def all(self, tag: str) -> Iterator[Element]:
        """Return the children of that tag."""
        return (child for child in self.children if child.tag == tag)

    def number(self, name: str, base: int = 10) -> int | None:
        """Return an attribute's number, from 0 to 2^31 - 1. None if it is missing or is no such
        number."""
        try:
            number = int(self.attributes.get(name, ""), base)
        except ValueError:
            return None
        return number if 0 <= number < 1 << 31 else None


class Place(NamedTuple):
    """The place of an element in a machine's tree: its NUMA node, and the bridges above it."""

    numa: int | None
    bridges: tuple[str, ...]


class BusIds:
    """The PCI addresses of a file, each of which may occur once."""

    def __init__(self, path: Path, attribute: str) -> None:
        self._path = path
        self._attribute = attribute
        self._lines: dict[str, int] = {}

    def take(self, element: Element) -> str:
        """Return an element's address. InputFileError: it is none, or has occurred before."""
        text = element.attributes.get(self._attribute, "")
        address = pci.normalise(text)
        where = f"topology file {self._path}, line {element.line}: {self._attribute}"
        if address is None:
            raise InputFileError(f"{where} {text[:40]!r} is no PCI address")
        if address in self._lines:
            first = self._lines[address]
            raise InputFileError(f"{where} {address} occurs twice; first in line {first}")
        self._lines[address] = element.line
        return address


def is_xml(start: bytes) -> bool:
    """Return whether a file that starts with these bytes is XML, and not JSON or text."""
    return start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"<")


def parse(text: bytes, path: Path) -> Element:
    """Return the root element of a file's text.

    Raises:
        InputFileError: it is no well-formed XML, declares entities, or is above the limits in
            elements or depth; states where in ``path``. Nothing it refers to is ever opened.
    """
    return _Reader(path).read(text)


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: list[Element] = []
        self._root: Element | None = None
        self._elements = 0
        self._parser = expat.ParserCreate()
        self._parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.buffer_text = True
        self._parser.CharacterDataHandler = self._text
        self._parser.EntityDeclHandler = self._entity

    def read(self, text: bytes) -> Element:
        try:
            self._parser.Parse(text, True)  # at once: in pieces, one huge tag takes squared time
        except (expat.ExpatError, UnicodeError, LookupError) as error:
            raise InputFileError(f"topology file {self._path} is not XML: {error}") from error
        assert self._root is not None, "expat refuses a document without an element"
        return self._root

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._elements += 1
        if self._elements > MOST_ELEMENTS:
            raise self._refused(f"more than {MOST_ELEMENTS} elements")
        if len(self._open) >= MOST_DEPTH:
            raise self._refused(f"more than {MOST_DEPTH} elements inside each other")
        element = Element(tag, attributes, self._parser.CurrentLineNumber)
        if self._open:
            self._open[-1].children.append(element)
        else:
            self._root = element
        self._open.append(element)

    def _end(self, _tag: str) -> None:
        self._open.pop()

    def _text(self, text: str) -> None:
        self._open[-1].texts.append(text)

    def _entity(self, name: str, *_declaration: object) -> None:
        raise self._refused(f"entity {name[:40]!r} is declared; no topology needs one")

    def _refused(self, why: str) -> InputFileError:
        return InputFileError(
            f"topology file {self._path}, line {self._parser.CurrentLineNumber}: {why}"
        )
