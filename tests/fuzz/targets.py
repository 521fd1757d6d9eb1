"""What is fuzzed: functions of bytes that come from outside. What is sound is taken for what it is,
all else is refused by name; whatever else they raise is a defect."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import typer
from torch.distributed import HashStore

from mkernel import bug_report, failure_record
from mkernel.backends.nics.session import Address, Key, _parse
from mkernel.cli import bench, plan, probe  # noqa: F401 - imported here, so that they are measured
from mkernel.cli import main as cli_main
from mkernel.cli import run as cli_run
from mkernel.doctor import Report
from mkernel.errors import ArgumentError, InputFileError, MkernelError, Untrusted, WorldError
from mkernel.harness import bench_run, gpu_tests, inputs, results
from mkernel.plan.model import LaunchPlan
from mkernel.topology import discover
from mkernel.topology.cost import load_constants
from mkernel.topology.model import Topology
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.heartbeats import Heartbeat, next_row, row_to_json
from mkernel.world.sealing import Seal
from mkernel.world.watchdog import Notice, Peer

_STORE = HashStore()
_BOOTSTRAP = Bootstrap(_STORE)  # without a secret, so that a stranger can sign too
_FOLDER = tempfile.TemporaryDirectory()
FILE = Path(_FOLDER.name) / "file"
"""The file that targets write and readers read; each process that fuzzes has its own."""


def bootstrap(data: bytes) -> list[str]:
    """A signed message, read as each of those that ranks write; which of them it is taken for."""
    _STORE.set("heartbeats/1", Seal(b"").close("heartbeats/1", data or b" "))
    try:
        value = _BOOTSTRAP.peek("heartbeats/1")
    except Untrusted:
        return []
    taken = ["JSON"]
    with contextlib.suppress(Untrusted):
        assert isinstance(Notice.from_json(value).error(), WorldError)
        taken.append("Notice")
    with contextlib.suppress(Untrusted):
        peer = Peer.from_hello(1, value)
        assert (peer.host, peer.pid) == (value["host"], value["pid"])
        taken.append("Peer")
    with contextlib.suppress(Untrusted):
        row = next_row(0, (Heartbeat(3), Heartbeat()), value)
        assert [[*each] for each in row_to_json(row)] == value
        assert row[0].beat >= 3
        taken.append("heartbeats")
    for model, text in itertools.product((Address, Key), (value, json.dumps(value))):
        with contextlib.suppress(ArgumentError):
            parsed = _parse(model, "text", text)
            assert model.model_validate_json(parsed.model_dump_json()) == parsed
            taken.append(model.__name__)
    return taken


def topology(data: bytes) -> None:
    """A file of any format that a topology is read from."""
    FILE.write_bytes(data)
    try:
        found = discover.read(FILE).topology
    except InputFileError:
        return
    assert Topology.model_validate_json(found.model_dump_json()) == found


def files(data: bytes) -> None:
    """A file of mkernel's own, as all that read one: a plan, results, constants, inputs."""
    FILE.write_bytes(data)
    with contextlib.suppress(InputFileError):
        made = LaunchPlan.from_file(FILE, "plan")
        assert LaunchPlan.model_validate_json(made.model_dump_json()).digest() == made.digest()
    for read in (results.read, gpu_tests.read, load_constants):
        with contextlib.suppress(InputFileError):
            read(FILE)
    for suffix, count in ((".safetensors", 1), (".npy", 2)):
        file = FILE.with_suffix(suffix)
        file.write_bytes(data)
        with contextlib.suppress(MkernelError):  # tensors that are no operands too
            inputs.load("all_gather_gemm", (file,) * count)


def record(data: bytes) -> None:
    """What was kept of the last failure, as ``mkernel doctor --report`` shows it."""
    FILE.write_bytes(data)
    with (
        mock.patch.object(failure_record, "path", return_value=FILE),
        mock.patch.object(bug_report, "examine", return_value=Report(rows=(), healthy=True)),
        mock.patch.object(bug_report, "setting_rows", return_value=()),
        mock.patch.object(bug_report, "versions", return_value={}),
    ):
        shown = bug_report.collect("none").model_dump_json()
    assert bug_report.BugReport.model_validate_json(shown).last_failure is not None


_UsageError: Any = typer.BadParameter.__base__
_COMMANDS = ("run", "bench", "plan", "probe")
_LEFT_OUT = {
    *("--json", "--plot", "--trace", "--scaling", "--output", "--measure"),  # write files
    *("--render", "--sysfs-root", "--model-only", "--simulate", "--random"),  # are long at work
}
_SETTING = re.compile(r"MKERNEL_[A-Z_]+=", re.ASCII)
_MOST_CPU_S, _MOST_BYTES = 5.0, 300 << 20


class _Launched(Exception):
    """The arguments are sound: ranks would be started now."""


def _no_launch(*_arguments: object, **_options: object) -> NoReturn:
    raise _Launched


def arguments(data: bytes) -> None:
    """A line an argument of the command line, or ``NAME=value`` of a setting. What starts with ``@`` is
    a file that holds the rest. Ranks are not started.

    A first line that is no command and an option that the command does not have stand for one that is
    and one that it has: else hardly a mutation would get past the parser of options.
    """
    lines = data.decode("utf-8", errors="surrogateescape").replace("\0", "").split("\n")
    settings = dict(line.split("=", 1) for line in lines if _SETTING.match(line))
    first, *rest = [line for line in lines if not _SETTING.match(line)] or [""]
    name = first if first in _COMMANDS else _COMMANDS[_number(first) % len(_COMMANDS)]
    command = [name, *(_known(line, _options(name)) for line in rest)]
    if any(line.partition("=")[0] in _LEFT_OUT for line in command):
        return
    said = io.StringIO()
    with (
        _environment(settings),
        _little(),
        mock.patch.object(cli_run, "launch", _no_launch),
        mock.patch.object(bench_run, "launch", _no_launch),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        contextlib.suppress(_Launched, MkernelError, _UsageError),
    ):
        cli_main.app([_file(line) for line in command], standalone_mode=False)
    assert all(line.isprintable() for line in said.getvalue().split("\n")), ascii(said.getvalue())


@functools.cache
def _options(command: str) -> tuple[str, ...]:
    """The long options of a command, but those that are left out."""
    group: Any = typer.main.get_command(cli_main.app)
    found = {name for one in group.get_command(None, command).params for name in one.opts}
    return tuple(sorted(name for name in found - _LEFT_OUT if name.startswith("--")))


def _known(line: str, options: tuple[str, ...]) -> str:
    name, equals, value = line.partition("=")
    if name.startswith("--") and name not in options and name not in _LEFT_OUT:
        name = options[_number(name) % len(options)]
    return name + equals + value


def _number(text: str) -> int:
    return sum(text.encode("utf-8", errors="surrogateescape"))


def _file(argument: str) -> str:
    if not argument.startswith("@"):
        return argument
    FILE.write_bytes(argument[1:].encode("utf-8", errors="surrogateescape"))
    return str(FILE)


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _little() -> Iterator[None]:
    """Whatever is done inside takes little CPU time and memory."""
    began, peak = time.process_time(), _peak()
    yield
    assert time.process_time() - began < _MOST_CPU_S
    assert _peak() - peak < _MOST_BYTES


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


TARGETS: dict[str, Callable[[bytes], object]] = {
    "bootstrap": bootstrap,
    "topology": topology,
    "arguments": arguments,
    "files": files,
    "record": record,
}
