"""Every help text is a sentence in the imperative, with the default in brackets behind it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mkernel.cli.main import COMMANDS, app
from mkernel.plan.ops import ALIASES, COMPANIONS, OPS

VERBS = re.compile(
    "Add|Compare|Count|Draw|Emulate|End|Exchange|Give|Judge|Lay|Leave|Let|Make|Measure|Model|Name|Plan|"
    "Predict|Print|Read|Route|Run|Scale|Send|Set|Show|Simulate|Spread|Start|Take|Time|Use|Write"
)


def command(name: str) -> Any:
    return typer.main.get_command(app).get_command(None, name)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_sentences_in_the_imperative(name: str) -> None:
    for parameter in command(name).params:
        said = parameter.help.replace("\\[", "[")
        assert re.fullmatch(r"[A-Z][^\n]*\.( \[.*\])?", said), said
        assert VERBS.fullmatch(said.split()[0]), said


@pytest.mark.parametrize("name", ["run", "plan", "bench"])
def test_help_lists_the_ops(name: str) -> None:
    said = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).stdout
    for op in (*OPS, *COMPANIONS, *ALIASES):
        assert re.search(rf"\b{op}\b", said), op
