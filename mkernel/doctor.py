"""Diagnosis of a machine: what can run on it, what cannot, why not, and the one thing to do about
it.

Nothing here raises: a backend that does not import, or whose own check fails, is a row like any
other.
"""

from __future__ import annotations

import mmap
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, SecretStr

from mkernel.backends.contracts.status import Status
from mkernel.errors import INSTALL_AGAIN
from mkernel.printable import one_line
from mkernel.settings import AUTO, MASK, PREFIX, Settings, load, load_as, variable
from mkernel.topology.model import Model
from mkernel.topology.sources.files import read_text

if TYPE_CHECKING:
    from mkernel.backends.contracts.accelerator import AcceleratorBackend
    from mkernel.backends.contracts.nic import NicBackend
    from mkernel.selection import Verdict

Kind = Literal[
    "setting",
    "auto",
    "accelerator",
    "device",
    "nic",
    "fabric",
    "library",
    "build",
    "cpu",
    "memory",
    "software",
]
Source = Literal["argument", "environment", "default"]

_OPTIONAL: frozenset[Kind] = frozenset(("build", "software"))
"""Kinds of rows that only building, or one backend's own rows, depend on; these rows state so."""
_REINSTALL = "reinstall the package that ships it"


class Row(Model):
    """One thing that can be usable or not. ``remedy`` is empty if nothing needs to be done;
    ``optional``: what runs here does not need it; ``asked``: False for the software of a backend
    that is used by name only, and that nobody has named."""

    kind: Kind
    name: str
    usable: bool
    detail: str
    remedy: str = ""
    optional: bool = False
    asked: bool = True


class Report(Model):
    """All rows. ``healthy``: at least one accelerator and one NIC path are usable, and commands
    refuse no setting."""

    rows: tuple[Row, ...]
    healthy: bool


class SettingRow(Model):
    """The current state of one setting: dotted name, value (secrets masked), origin."""

    name: str
    value: Any
    source: Source
    environment: str
    description: str


def examine() -> Report:
    """Query every backend and check what building and running need. Never raises."""
    wrong = wrong_settings()
    rows = [*accelerator_rows(), *nic_rows(), *auto_rows(), *machine_rows(), *software_rows()]
    usable = {row.kind for row in rows if row.usable}
    return Report(rows=(*wrong, *rows), healthy=not wrong and {"accelerator", "nic"} <= usable)


def wrong_settings() -> list[Row]:
    """Return a row for a value in the environment that every command refuses; empty if nothing is
    wrong."""
    row = _asked("setting", "environment", _settings, "correct that environment variable")
    return [] if row.usable else [row]


def _settings() -> Status:
    """Raise if a value is illegal, or a backend is not installed."""
    from mkernel import selection
    from mkernel.backends import registry

    settings = load()
    for name in selection.accelerator_names(settings.accelerator):
        if name != AUTO:
            registry.accelerator(name)
    if settings.nic != AUTO:
        registry.nic(settings.nic)
    return Status(True, "")


def auto_rows() -> list[Row]:
    """Return the choices of ``auto`` here, and their reasons: the accelerator; NIC and verbs
    between nodes."""
    return [
        _asked("auto", name, ask, "name one, or see below")
        for name, ask in (("accelerator", _auto_accelerator), ("nic, verbs", _auto_nic))
    ]


def _auto_accelerator() -> Status:
    from mkernel import selection

    verdicts = selection.accelerator_verdicts()
    taken = _taken(verdicts)
    companions = selection.companions_of(taken.name, 1) if taken else ()
    passed_over = (
        v
        for v in verdicts
        if v is not taken
        and v.name not in companions
        and (taken is None or v.detail != selection.BY_NAME)
    )
    others = "; ".join(f"not {v.name}: {v.detail}" for v in passed_over)
    if taken is None:
        return Status(False, others, "name one: accelerator=, --accelerator or MKERNEL_ACCELERATOR")
    beside = f", and for ops that it lacks {' and '.join(companions)}" if companions else ""
    found = f"{taken.name} ({taken.detail}){beside}"
    return Status(True, found + (f"; {others}" if others else ""))


def _taken(verdicts: Sequence[Verdict]) -> Verdict | None:
    return next((verdict for verdict in verdicts if verdict.usable), None)


def _auto_nic() -> Status:
    from mkernel import selection

    nic = selection.chosen_nic()
    verbs = selection.chosen_verbs(nic)
    found = f"{nic} on {verbs}"
    if verbs == selection.SOFT:
        found += ": no RDMA port is usable; it joins processes of one host only"
    return Status(True, found + _without_nic())


def _without_nic() -> str:
    """Return text for an accelerator chosen by `auto` that opens no NIC; empty if it opens one."""
    from mkernel import selection
    from mkernel.backends import registry

    taken = _taken(selection.accelerator_verdicts())
    if taken is None:
        return ""
    claims = registry.accelerator(taken.name).capabilities()
    if not claims.process_group:
        return ""
    return f"; {taken.name} does not open it: {claims.carrier} carries its bytes"


def accelerator_rows() -> list[Row]:
    """Return a row for every installed accelerator backend, and for what it finds there."""
    return list(_backend_rows("accelerator", "ACCELERATORS", _ask_accelerator))


def nic_rows() -> list[Row]:
    """Return a row for every installed NIC backend on each of its verbs providers, and for what it
    finds there: ports, libraries, ways to device memory."""
    return list(_backend_rows("nic", "NICS", _ask_nic))


def _row(kind: Kind, name: str, status: Status) -> Row:
    remedy = status.remedy
    return Row(kind=kind, name=name, usable=status.usable, detail=status.detail, remedy=remedy)


def _asked(kind: Kind, name: str, ask: Callable[[], Status], remedy: str = "") -> Row:
    """Return the result of ``ask`` as a row; ``remedy`` is for a query that fails."""
    try:
        status = ask()
    except Exception as error:
        status = Status(False, one_line(error), remedy)
    return _row(kind, name, status)


def _backend_rows(
    kind: Literal["accelerator", "nic"], group: str, ask: Callable[[Any, str], Iterator[Row]]
) -> Iterator[Row]:
    try:
        from mkernel.backends import registry

        names = registry.names(getattr(registry, group))
    except Exception as error:
        detail = f"backends cannot be listed: {one_line(error)}"
        yield _row(kind, "-", Status(False, detail, INSTALL_AGAIN))
        return
    if not names:
        detail = f"no {kind} backend is installed"
        yield _row(kind, "-", Status(False, detail, INSTALL_AGAIN))
    for name in names:
        try:
            yield from ask(getattr(registry, kind)(name), name)
        except Exception as error:  # noqa: PERF203 - one that fails must not hide the others
            yield _row(kind, name, Status(False, one_line(error), _REINSTALL))


def _ask_accelerator(backend: AcceleratorBackend, name: str) -> Iterator[Row]:
    yield _row("accelerator", name, backend.status())
    for what, verdict in backend.details():
        yield _row("device", f"{name}: {what}", verdict)


def _ask_nic(backend: NicBackend, name: str) -> Iterator[Row]:
    for provider in backend.providers:
        path = f"{name} on {provider}"
        try:
            status = backend.status(provider)
        except Exception as error:  # one provider's fault must not hide the others
            yield _row("nic", path, Status(False, one_line(error), _REINSTALL))
            continue
        yield _row("nic", path, status)
        for what, verdict in backend.details(provider):
            yield _row("fabric", f"{path}: {what}", verdict)


def machine_rows(root: Path = Path("/")) -> list[Row]:
    """Return rows for libraries, build tools, CPU and shared memory. ``root``: the folder that
    holds /usr, /proc and so on."""
    checks: tuple[tuple[Kind, str, Callable[[], Status]], ...] = (
        ("library", "torch", _torch),
        ("library", "pyverbs", _pyverbs),
        ("build", "C++ compiler", _compiler),
        ("build", "libibverbs headers", lambda: _verbs_headers(root)),
        ("cpu", platform.machine() or "CPU", lambda: _cpu(root)),
        ("memory", "shared memory", lambda: _shared_memory(root)),
    )
    rows = [_asked(kind, name, check) for kind, name, check in checks]
    return [
        row.model_copy(update={"optional": row.kind in _OPTIONAL or row.name == "pyverbs"})
        for row in rows
    ]


def software_rows(root: Path = Path("/")) -> list[Row]:
    """Return rows for the vendors' software that accelerator backends find. ``root``: the folder
    that holds /usr, /dev and so on."""
    rows = []
    try:
        from mkernel.backends import registry

        names = registry.names(registry.ACCELERATORS)
    except Exception:  # the backends' own rows say so
        return []
    for name in names:
        try:
            found = registry.accelerator(name).software(root)
        except Exception:
            continue
        asked = _is_asked_about(name)
        update = {"optional": True, "asked": asked}
        rows += [_row("software", *each).model_copy(update=update) for each in found]
    return rows


def _is_asked_about(name: str) -> bool:
    """Return whether a backend's software is of interest: ``auto`` may choose the backend, or
    settings name it."""
    from mkernel import selection
    from mkernel.backends import registry

    try:
        named = selection.accelerator_names(load().accelerator)
        return name in named or registry.accelerator(name).preference > 0
    except Exception:  # the setting's own row says so, or the backend's
        return True


def _torch() -> Status:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Status(False, "not installed", "pip install torch")
    try:
        import torch
    except Exception as error:
        return Status(False, f"{version} does not import: {one_line(error)}", "reinstall torch")
    runtimes = [
        f"{name} {value}"
        for name, value in vars(torch.version).items()
        if isinstance(value, str) and not name.startswith("__") and name != "git_version"
    ]
    return Status(True, f"{torch.__version__} ({', '.join(runtimes) or 'for CPUs only'})")


def _pyverbs() -> Status:
    """Return the status of pyverbs, a second source on RDMA ports for `mkernel probe`
    (``topology/sources/verbs.py``)."""
    remedy = (
        "install python3-pyverbs (of rdma-core; Debian, Ubuntu, Fedora), which is for the system's own "
        "Python: run that, or one of its version with the package's folder in PYTHONPATH"
    )
    try:
        found = find_spec("pyverbs")
        if found is None:
            return Status(
                False, "not installed; needed only to compare what it says of ports", remedy
            )
        import_module("pyverbs.device")
    except Exception as error:  # one that was built for another Python may raise anything
        return Status(False, f"does not import: {one_line(error)}; it is never needed", remedy)
    where = (found.submodule_search_locations or [""])[0]
    return Status(True, f"{where} (`mkernel probe` asks it too)")


def _compiler() -> Status:
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        found = shutil.which(name)
        if found:
            return Status(True, f"{found} (needed only to build)")
    return Status(False, "none found; needed only to build", "install g++ or clang++")


def _verbs_headers(root: Path) -> Status:
    for folder in ("usr/include", "usr/local/include"):
        if (root / folder / "infiniband/verbs.h").is_file():
            return Status(True, f"/{folder}/infiniband/verbs.h")
    return Status(
        False,
        "infiniband/verbs.h not found; needed only to build the NIC backends",
        "install libibverbs-dev",
    )


def _cpu(root: Path) -> Status:
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd")
    flags: set[str] = set()
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"flags", "Features"}:
            flags = set(value.split())
            break
    count = os.cpu_count() or 0
    named = ", ".join(flag for flag in wanted if flag in flags) or "no vector extension found"
    return Status(True, f"{count} CPUs; {named}")


def _shared_memory(root: Path) -> Status:
    """Return the status of shared memory, which ranks of a node get through memfd, or through
    /dev/shm."""
    if hasattr(os, "memfd_create"):
        try:
            handle = os.memfd_create("mkernel-doctor", os.MFD_CLOEXEC)
        except OSError:
            pass
        else:
            try:
                os.ftruncate(handle, mmap.PAGESIZE)
                mmap.mmap(handle, mmap.PAGESIZE).close()
            finally:
                os.close(handle)
            return Status(True, "memfd works")
    shm = root / "dev/shm"
    if shm.is_dir() and os.access(shm, os.W_OK):
        free = shutil.disk_usage(shm).free
        return Status(True, f"/dev/shm is writable, {free / 2**20:.0f} MiB free")
    return Status(False, "neither memfd nor a writable /dev/shm", "mount a tmpfs at /dev/shm")


def setting_rows(settings: Settings | None = None) -> list[SettingRow]:
    """Return every setting with its value and its origin; secrets are masked.

    Args:
        settings: the settings in force. None: those of the environment.

    Raises:
        ArgumentError: a variable of the environment holds no legal value.
    """
    from_environment = load()
    present = {key.upper() for key in os.environ}
    rows = _walk(settings or from_environment, from_environment, (), present)
    return [*rows, *_rows_of_backends()]


def _rows_of_backends() -> Iterator[SettingRow]:
    """Yield the settings that installed accelerator backends add, from the environment."""
    from mkernel.backends import registry

    for name in registry.names(registry.ACCELERATORS):
        try:
            model = registry.accelerator(name).settings
        except Exception:
            continue
        if model is None:
            continue
        found, prefix = load_as(model), str(model.model_config["env_prefix"])
        for field, about in model.model_fields.items():
            environment = variable((field,), prefix)
            yield SettingRow(
                name=environment.removeprefix(PREFIX).lower(),
                value=getattr(found, field),
                source="environment" if field in found.model_fields_set else "default",
                environment=environment,
                description=about.description or "",
            )


def _walk(
    model: BaseModel, other: BaseModel, path: tuple[str, ...], present: set[str]
) -> Iterator[SettingRow]:
    """Yield rows of a model. ``other`` is the same model as the environment alone sets it."""
    for name, field in type(model).model_fields.items():
        where = (*path, name)
        value, theirs = getattr(model, name), getattr(other, name)
        if isinstance(value, BaseModel):
            yield from _walk(value, theirs, where, present)
            continue
        source: Source = "default"
        if name in model.model_fields_set:
            # A whole group may also be given as one JSON value.
            named = any(variable(where[: i + 1]) in present for i in range(len(where)))
            source = "environment" if named and value == theirs else "argument"
        if isinstance(value, SecretStr):
            value = MASK if value.get_secret_value() else ""
        yield SettingRow(
            name=".".join(where),
            value=value,
            source=source,
            environment=variable(where),
            description=field.description or "",
        )
