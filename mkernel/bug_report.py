"""The file that ``mkernel doctor --report`` writes, to attach to a report that strangers may read.

It contains the environment variables listed in ``bug_report.json``, and no others. The host's name
and the user's home folder become ``host`` and ``~`` wherever they occur.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from mkernel import __version__, failure_record
from mkernel.doctor import Row, Source, examine, setting_rows
from mkernel.errors import ArgumentError
from mkernel.printable import one_line
from mkernel.topology.model import Model

_ENVIRONMENT = Path(__file__).with_suffix(".json")


class SettingValue(Model):
    """The current value of a setting; a secret is masked."""

    value: Any
    source: Source


class BugReport(Model):
    """Everything that a report of a defect should say of a machine.

    ``topology``, ``settings``: a sentence instead if they are not available. ``last_failure``: the
    record that :mod:`mkernel.failure_record` kept; None: no world broke here.
    """

    versions: dict[str, str]
    environment: dict[str, str]
    healthy: bool
    devices: tuple[Row, ...]
    settings: dict[str, SettingValue] | str
    topology: dict[str, Any] | str
    notes: tuple[str, ...] = ()
    last_failure: dict[str, Any] | str | None


def collect(topology: dict[str, Any] | str, notes: tuple[str, ...] = ()) -> BugReport:
    """Collect the report of this machine. Never raises.

    Args:
        topology: the machine's topology, as JSON-safe data, or why it is unknown.
        notes: what discovery left out, and why.
    """
    try:
        settings: dict[str, SettingValue] | str = {
            row.environment: SettingValue(value=row.value, source=row.source)
            for row in setting_rows()
        }
    except ArgumentError as error:
        settings = one_line(error)
    try:
        failure: dict[str, Any] | str | None = failure_record.last()
    except Exception as error:  # the file's content is not trusted
        failure = f"cannot be read: {one_line(error)}"
    found = examine()
    made = BugReport(
        versions=versions(),
        environment={n: os.environ[n] for n in reported_variables() if n in os.environ},
        healthy=found.healthy,
        devices=found.rows,
        settings=settings,
        topology=topology,
        notes=notes,
        last_failure=failure,
    )
    return BugReport.model_validate(anonymous(made.model_dump(mode="json")))


class _Environment(Model):
    source: str
    variables: tuple[str, ...]
    packages: tuple[str, ...]


def reported_variables() -> tuple[str, ...]:
    """Return the environment variables that a report may show."""
    return _environment().variables


@cache
def _environment() -> _Environment:
    return _Environment.from_file(_ENVIRONMENT, "file of variables and packages")


def versions() -> dict[str, str]:
    """Return the versions of mkernel, Python, related packages and the system."""
    found = {"mkernel": __version__, "python": sys.version.split()[0]}
    found |= {name: version for name in _environment().packages if (version := _version(name))}
    found |= {"kernel": platform.release(), "machine": platform.machine()}
    found["libc"] = " ".join(platform.libc_ver())
    try:
        found["system"] = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        found["system"] = platform.system()
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def anonymous(value: Any) -> Any:
    """Return JSON-safe data without the host's name and the user's home folder."""
    names = {socket.gethostname(), platform.node()} - {"", "localhost", "host"}
    patterns = [(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "host") for name in sorted(names)]
    home = str(Path.home())
    if len(home) > 1:
        patterns.append((rf"{re.escape(home)}(?![\w-])", "~"))
    return _replaced(value, patterns)


def _replaced(value: Any, patterns: list[tuple[str, str]]) -> Any:
    if isinstance(value, str):
        for pattern, instead in patterns:
            value = re.sub(pattern, instead, value)
        return value
    if isinstance(value, dict):
        return {_replaced(k, patterns): _replaced(v, patterns) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(each, patterns) for each in value]
    return value
