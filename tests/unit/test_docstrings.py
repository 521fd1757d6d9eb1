"""Docstrings begin as sentences: ruff's D rules see verbs, and these tests see first words."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUESTIONS_AND_GENITIVES = frozenset(
    ("Of", "What", "Whether", "Where", "When", "How", "Why", "Who", "Whose", "Which", "By", "That")
)
QUESTIONS_AND_GENITIVES_OF_TWO = ("In which", "In what", "To what", "For what")


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield docstrings, and the strings below constants and fields."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as found):
                yield found


def wrong(source: str) -> list[str]:
    """List the docstrings of a file that begin as a question or as a genitive."""
    found = ((one.lineno, str(one.value).strip()) for one in strings(ast.parse(source)))
    return [
        f"line {line}: {text[:60]!r}"
        for line, text in found
        if text.partition(" ")[0].rstrip(":,.") in QUESTIONS_AND_GENITIVES
        or text.startswith(QUESTIONS_AND_GENITIVES_OF_TWO)
    ]


def finished() -> list[Path]:
    """List the files whose docstrings are sentences."""
    folders = (ROOT / "backends", ROOT / "topology", ROOT / "mkernel")
    files = (file for folder in folders for file in folder.rglob("*.py*"))
    return sorted(file for file in files if file.suffix in (".py", ".pyi"))


def test_no_docstring_begins_as_a_question_or_a_genitive() -> None:
    files = finished()
    assert len(files) > 200
    found = {file.relative_to(ROOT): wrong(file.read_text()) for file in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "planted",
    [
        '"""Of the zigzag."""',
        'def held():\n    """Whether a rank has it."""',
        'class Call:\n    number: int\n    """What the world counts."""',
        'DTYPE = 1\n"""In which products are rounded."""',
    ],
)
def test_a_planted_fragment_is_seen(planted: str) -> None:
    assert len(wrong(planted)) == 1
    assert wrong(planted.replace('"""', '"""The ', 1)) == []
