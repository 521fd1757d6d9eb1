"""Shared fixtures: nothing a test started may outlive it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from mkernel import fork_server

# Processes of this session have it in their environment, so that tests may run side by side.
_SESSION = "PYTEST_SESSION_OF_MKERNEL"
_SEMAPHORES = "/mp-of-tests-"
_IMPORTED_ONCE = (
    "mkernel.backends.accelerators.ascend",
    "mkernel.backends.accelerators.hopper",
    "mkernel.backends.accelerators.streams",
    "mkernel.backends.accelerators.streams.moe",
    "mkernel.backends.accelerators.streams.worker",
    "mkernel.backends.nics.cx7",
    "mkernel.backends.nics.efa",
    "mkernel.cases",
    "mkernel.conformance.checks",
    "mkernel.conformance.faults",
    "mkernel.harness.rank",
    "mkernel.nn",
    "pytest",
    "sympy.tensor.tensor",
    "torch._dynamo.backends.debugging",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.experimental",
    "torch.testing._internal.optests",
)
"""What ranks of many tests use, and what they would import for seconds of CPU time each."""
_PATIENCE_S = 120  # for what ends by itself, on a machine that is busy

# Threads of OpenMP and of numpy's BLAS wait by spinning, which is most of the CPU time of small
# products where tests run side by side. Set before the libraries are loaded, for all that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Inductor's compile workers are processes with a torch of their own each, for programs of a few
# kernels. Older torch starts them as it is imported, from the process that ranks are forked from.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# readline sets it, unseen, in pytest, whose workers inherit it: tables would be as wide as a terminal.
os.environ.pop("COLUMNS", None)
# What a later torch takes away, or changes, is an error of programs that warn of it: also of those that
# tests start.
os.environ.setdefault("PYTHONWARNINGS", "error::FutureWarning")

# What is imported and collected stays; each worker would look through it for garbage again and again.
gc.disable()


def pytest_configure() -> None:
    """Mark what we start. A shell that starts us in the background has us, and all that we start,
    ignore Ctrl-C."""
    os.environ[_SESSION] = str(os.getpid())
    # How long an example takes is the machine's business.
    hypothesis.settings.register_profile("mkernel", deadline=None)
    hypothesis.settings.load_profile("mkernel")
    # Where there is a GPU these imports ask its driver, which no forked process survives.
    if not Path("/dev/nvidiactl").exists():
        fork_server.also_imported[:] = _IMPORTED_ONCE
    # Only their names tell whose semaphores a killed process left; what we start inherits the prefix.
    multiprocessing.current_process()._config["semprefix"] = f"{_SEMAPHORES}{os.getpid()}"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Look for garbage from now on, among what tests make."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Ranks that tests have kept, where any have, end with them."""
    if kept := sys.modules.get("kept_ranks"):
        kept.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests begin first: else one of them would be what all other workers wait for at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _rank_processes() -> set[int]:
    """Rank processes of this test session: children of its fork server."""
    mine = os.getpid()
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            fields = stat.rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    servers = {pid for pid, parent in parents.items() if parent == mine}
    return {pid for pid, parent in parents.items() if parent in servers}


def _shared_memory() -> set[str]:
    """Names of shared memory, but for what other sessions have mapped, or named after themselves."""
    names = {entry.name for entry in Path("/dev/shm").iterdir()}
    theirs = re.compile(rf"sem\.{_SEMAPHORES[1:]}(?!{os.getpid()}-)")
    names = {name for name in names if not theirs.match(name)}
    return names - _mapped_by_others() if names else names


def _mapped_by_others() -> set[str]:
    found: set[str] = set()
    mark = f"{_SESSION}={os.getpid()}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark not in (entry / "environ").read_bytes().split(b"\0"):
                found.update(re.findall(r" /dev/shm/(\S+)", (entry / "maps").read_text()))
        except OSError:  # ended, or another user's
            continue
    return found


def _own_memfds() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if "memfd:mkernel" in target:
            found.append(target)
    return found


@pytest.fixture
def torchrun(tmp_path: Path) -> list[str]:
    """torchrun's command, at a free port and with its files in the test's folder."""
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    here = ["--standalone", "--local-addr", "127.0.0.1"]  # whatever this machine is called
    return [*launcher, *here, "--log-dir", str(tmp_path / "torchrun")]


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Fail where the test left a rank process, shared memory or a symmetric segment behind."""
    before = _rank_processes(), _shared_memory(), len(_own_memfds())
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        kept = sys.modules.get("kept_ranks")
        processes = _rank_processes() - before[0] - (kept.processes() if kept else set())
        memory = _shared_memory() - before[1]
        if not (processes or memory) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not processes, "rank processes are left"
    assert not memory, "shared memory segments are left"
    assert len(_own_memfds()) <= before[2], "symmetric segments are left open"
