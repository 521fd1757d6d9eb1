"""Schema versions of mkernel's files: plans, topologies, constants and results.

A model's first field holds the version: ``schema_version``, a number, or ``format``, which also
names the kind (``mkernel-bench-1``). So a file of another version is refused by its version, not by
a field that this version does not have. A file that may lack the field has version 1 without it.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from mkernel.printable import printable
from mkernel.version import __version__

_MOST_SHOWN = 60


def refusal(told: object, known: str) -> str:
    """Return why a file of version ``told`` is not read; ``known``: the versions that are read, in
    words."""
    return (
        f"{printable(repr(told), _MOST_SHOWN)} is of another version of mkernel; this one "
        f"({__version__}) reads {known}: make the file anew with this one, or use the one that made it"
    )


def _known(told: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(told)
    except ValidationError:
        text = refusal(told, _expected(validate))
        raise PydanticCustomError("schema_version", "{text}", {"text": text}) from None


def _expected(validate: ValidatorFunctionWrapHandler) -> str:
    """Return the versions that are read, in words. Only the error of a value that is none of them
    names them: that of a number with too many digits, say, does not."""
    try:
        validate(None)
    except ValidationError as error:
        return str(error.errors(include_url=False, include_input=False)[0]["ctx"]["expected"])
    raise AssertionError("None is no version")


SchemaVersion = WrapValidator(_known)
"""Annotates a field whose type is a Literal of the versions that are read."""
