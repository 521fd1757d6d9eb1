"""Ranks as processes of this machine: ``launch`` starts them, waits, and cleans up whatever
happens.

Processes come from a fork server that has imported mkernel once, so that starting a rank costs
milliseconds. The launcher hosts the bootstrap store on its own loopback socket, so the store
survives a rank's death.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import secrets
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar

import torch
from pydantic import SecretStr
from torch.distributed import TCPStore

from mkernel import fork_server
from mkernel.backends.runtime.threads import Thread
from mkernel.errors import ArgumentError, MkernelError, PeerFailure, Timeout, Unsupported
from mkernel.host_limits import check_descriptors, check_loopback
from mkernel.plan.arguments import check_world
from mkernel.selection import SOFT
from mkernel.settings import AUTO, MAX_LAUNCHED, Settings, check_timeout
from mkernel.settings import load as load_settings
from mkernel.world import lifecycle

T = TypeVar("T")

_ALWAYS_STARTED = 16
"""The number of ranks that may be started however few the CPUs are."""
_UNGUARDED = "mkernel.launch was called while its caller's script was imported"
_JOIN_WAITS = 4
"""The number of waits for other ranks in joining a world, each up to the deadline of a wait."""
_BEGIN_S = 60.0
"""Seconds that a process, its imports and its backend may take in addition on a busy machine."""
_DESCRIPTORS, _DESCRIPTORS_A_RANK = 14, 5
"""The descriptors that a launcher opens for the store and the fork server, and for each rank. If
none is left, the store's thread that accepts connections ends the process."""
_GRACE_S = 5.0
"""Seconds beyond two heartbeats, in which all ranks hear of a failure, that they get to report theirs
after the first."""


class RankTraceback(Exception):
    """The cause of an error that ``launch`` re-raises: the traceback text of the rank."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True)
class _Job:
    """The data that a rank process gets."""

    launcher: int  # process id
    rank: int
    nodes: int
    ranks_per_node: int
    port: int
    backends: tuple[str | Sequence[str] | None, str | None, str | None]
    settings: Settings
    work: bytes  # pickled (fn, args, kwargs)
    environment: dict[str, str]  # the launcher's current one; the fork server's is older


def check_ranks(
    nodes: int,
    ranks_per_node: int,
    ranks_per_cpu: int,
    names: tuple[str, str] = ("nodes", "ranks_per_node"),
) -> None:
    """Raise ArgumentError if this machine does not start so many ranks. Each is a process, and
    while many of them wait for a CPU, the others' waits reach their deadlines.

    Args:
        names: names of the first two arguments in messages.
    """
    check_world(nodes, ranks_per_node, names)
    cpus = len(os.sched_getaffinity(0))
    most = min(max(_ALWAYS_STARTED, ranks_per_cpu * cpus), MAX_LAUNCHED)
    if nodes * ranks_per_node > most:
        argument, value = (names[0], nodes) if nodes > 1 else (names[1], ranks_per_node)
        raise ArgumentError(
            argument,
            value,
            f"at most {most} ranks in all on this machine of {cpus} CPUs; MKERNEL_RANKS_PER_CPU "
            f"(now {ranks_per_cpu}) allows up to {MAX_LAUNCHED}",
            why=f"{nodes} x {ranks_per_node} = {nodes * ranks_per_node} ranks",
        )


class _Channel:
    """The rank's end of the pipe to its launcher."""

    connection: Connection | None = None


def report(payload: Any) -> None:
    """Send ``payload`` (picklable) from inside a rank to the launcher's ``on_report``.

    Does nothing in a process that ``launch`` did not start.
    """
    if _Channel.connection is not None:
        _Channel.connection.send_bytes(pickle.dumps(("report", payload)))


def launch(
    fn: Callable[..., T],
    *args: Any,
    nodes: int | None = None,
    ranks_per_node: int = 1,
    accelerator: str | Sequence[str] | None = None,
    nic: str | None = None,
    verbs: str | None = None,
    timeout_s: float | None = None,
    settings: Settings | None = None,
    on_report: Callable[[int, Any], None] = lambda rank, payload: None,
    **kwargs: Any,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on nodes x ranks_per_node ranks of this machine.

    Each rank is a process in an initialized world (:func:`mkernel.world` returns it). With more
    than one node, ranks of different nodes communicate only through the NIC.

    Args:
        fn: importable by name from a module (it travels by pickle, as do arguments and results), so not
            one that was typed at a prompt.
        nodes: by default 1; or where the ranks' devices do not all reach each other's memory, as many
            as reach each other, and ``ranks_per_node`` is the number of all ranks.
        timeout_s: deadline of every wait inside the world, in seconds.
        on_report: called here with (rank, payload) for each :func:`report` of a rank.

    Each rank imports the caller's main script, as processes of Python's ``multiprocessing`` do:
    code that must not run on import, ``launch`` included, belongs under
    ``if __name__ == "__main__":``.

    Returns:
        The ranks' results, in rank order.

    Raises:
        Exception: the first failure among the ranks, with that rank's traceback as its cause. No
            process, socket or shared memory is left behind.
        PeerFailure: a rank died without a report.
        Timeout: a rank was not in the world long after all deadlines: its backend hangs as it opens.
        Unsupported: this process may start none, for example because it is a rank that ``launch``
            started.
        BackendUnavailable: the host has no 127.0.0.1, or no folder for temporary files. OSError: the
            process may not open as many descriptors as that takes.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # This is a rank that is about to begin: it ends here, and its launcher reports why.
        raise SystemExit(_UNGUARDED)
    if multiprocessing.current_process().daemon:
        raise Unsupported(
            "mkernel.launch was called in a process that may start no others: a rank that it started, "
            "which is in a world already (mkernel.world()), or a worker of a pool or DataLoader; call "
            "it from the main process"
        )
    settings = settings or load_settings()
    check_ranks(1 if nodes is None else nodes, ranks_per_node, settings.ranks_per_cpu)
    if nodes is None:
        each = lifecycle.ranks_together(accelerator, ranks_per_node, settings)
        if each is not None and (verbs or settings.verbs) == AUTO:
            verbs = SOFT
        size, ranks_per_node = ranks_per_node, each or ranks_per_node
        nodes = size // ranks_per_node
    if timeout_s is not None:
        check_timeout("timeout_s", timeout_s)
        settings = settings.model_copy(update={"timeout_s": timeout_s})
    settings = settings.model_copy(update={"job_secret": SecretStr(secrets.token_hex(32))})
    name = getattr(fn, "__qualname__", "")
    if _script() is None and fn.__module__ == "__main__" and name.isidentifier():
        raise ArgumentError(
            "fn",
            repr(fn),
            f"a function in a file: write it to steps.py (in a notebook by %%writefile steps.py), then "
            f"these two lines work: from steps import {name}; mkernel.launch({name}, "
            f"ranks_per_node={ranks_per_node})",
            why="it was typed at a prompt, and ranks are other processes, which import it",
        )
    try:
        work = pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ArgumentError(
            "fn",
            repr(fn),
            "a function and arguments that pickle (module level, no lambdas)",
            why=str(error),
        ) from error

    size = nodes * ranks_per_node
    store, port = host_store(size, settings.timeout_s)
    ranks: list[_Rank] = []
    try:
        with _imported_script():
            context = fork_server.context()
            for rank in range(size):
                job = _Job(
                    os.getpid(),
                    rank,
                    nodes,
                    ranks_per_node,
                    port,
                    (accelerator, nic, verbs),
                    settings,
                    work,
                    dict(os.environ),
                )
                ranks.append(_Rank(context, job))
        _supervise(ranks, on_report, settings)
        return [rank.result() for rank in ranks]
    finally:
        _clean_up(ranks)
        del store


def _script() -> str | None:
    """Return the main script, which each rank imports; None: the program was typed at a prompt, or
    piped into Python."""
    file: str | None = getattr(sys.modules["__main__"], "__file__", None)
    return file if file is not None and os.path.isfile(file) else None


@contextmanager
def _imported_script() -> Iterator[None]:
    """Keep ranks that start meanwhile from importing a main script that is no file (``<stdin>``)."""
    main = vars(sys.modules["__main__"])
    file = None if _script() else main.pop("__file__", None)
    try:
        yield
    finally:
        if file is not None:
            main["__file__"] = file


class _Rank:
    """A rank process as its launcher sees it."""

    def __init__(self, context: ForkServerContext, job: _Job) -> None:
        """Start the process."""
        self.number = job.rank
        self.outcome: tuple[str, Any] | None = None
        self.begun = False
        self.joined = False
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_rank_main, args=(job, theirs), name=f"mkernel-rank{job.rank}", daemon=True
        )
        self.process.start()
        theirs.close()

    def receive(self, on_report: Callable[[int, Any], None]) -> None:
        """Take what the rank sent; record its death if it sent nothing more."""
        try:
            while self.outcome is None and self.connection.poll():
                kind, payload = pickle.loads(self.connection.recv_bytes())
                if kind == "begun":
                    self.begun = True
                elif kind == "joined":
                    self.joined = True
                elif kind == "report":
                    on_report(self.number, payload)
                else:
                    self.outcome = (kind, payload)
        except (EOFError, ConnectionError):
            self._died()
            return
        if self.outcome is None and not self.process.is_alive() and not self.connection.poll():
            self._died()

    def _died(self) -> None:
        self.process.join(_GRACE_S)
        code = self.process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        who = f"rank {self.number} (process {self.process.pid})"
        text = f"{who} died: {how}" if self.begun else f"{who} {_never_began(how)}"
        self.outcome = ("died", text)

    def give_up(self, seconds: float) -> None:
        """Treat the rank as hanging: it is not in the world after ``seconds``."""
        text = (
            f"rank {self.number} (process {self.process.pid}) was not in the world {seconds:g} s after "
            "the launch: its backend hangs as it opens, or the machine is far too busy; `mkernel "
            "doctor` tries what backends need, and a larger timeout_s gives them more time"
        )
        self.outcome = ("overdue", text)

    def result(self) -> Any:
        """Return the function's result; only valid after supervision ended without failure."""
        assert self.outcome is not None
        return pickle.loads(self.outcome[1])

    def error(self) -> BaseException:
        """Return the failure as the exception to raise here."""
        assert self.outcome is not None
        kind, payload = self.outcome
        if kind == "died":
            return PeerFailure(payload, self.number)
        if kind == "overdue":
            return Timeout(payload)
        pickled, text = payload
        error: BaseException
        try:
            error = pickle.loads(pickled)
        except Exception:
            error = MkernelError(f"rank {self.number} raised an error that does not unpickle")
        error.__cause__ = RankTraceback(f"rank {self.number}:\n{text}")
        return error


def _never_began(how: str) -> str:
    """Return text about a rank that died before it reached its function."""
    script = _script()
    if script is None:
        return f"died before it began: {how}"
    return (
        f"ended while it imported {script}, as each rank does ({how}): put the call of mkernel.launch "
        'there, and what else only the script itself is to do, under `if __name__ == "__main__":`; an '
        "error of the import itself is printed above"
    )


def _supervise(
    ranks: list[_Rank], on_report: Callable[[int, Any], None], settings: Settings
) -> None:
    """Wait for all ranks; raise the first failure once the others had a chance to report theirs."""
    first: _Rank | None = None
    deadline = float("inf")
    most_s = min(_JOIN_WAITS * settings.timeout_s, settings.join_timeout_s) + _BEGIN_S
    all_joined_by = time.monotonic() + most_s
    while True:
        running = [rank for rank in ranks if rank.outcome is None]
        if not running or time.monotonic() > deadline:
            break
        sources = [r.connection for r in running] + [r.process.sentinel for r in running]
        wait(sources, timeout=0.5)
        for rank in running:
            rank.receive(on_report)
            if rank.outcome is not None and rank.outcome[0] != "result" and first is None:
                first = rank
                deadline = time.monotonic() + _GRACE_S + 2 * settings.heartbeat_s
        if first is None and time.monotonic() > all_joined_by:
            absent = [rank for rank in running if rank.outcome is None and not rank.joined]
            if absent:
                absent[0].give_up(most_s)
                raise absent[0].error()
    if first is None:
        return
    # A rank that was only told of a failure may report before the one that failed.
    for rank in ranks:
        if rank.outcome is not None and rank.outcome[0] == "died":
            first = rank
    if first.outcome is not None and first.outcome[0] == "error":
        error = first.error()
        origin = error.peer if isinstance(error, PeerFailure) else first.number
        if 0 <= origin < len(ranks):
            outcome = ranks[origin].outcome
            if outcome is not None and outcome[0] != "result":
                first = ranks[origin]
    raise first.error()


def _clean_up(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.process.is_alive() and (rank.outcome is None or rank.outcome[0] != "result"):
            rank.process.terminate()
    for rank in ranks:
        rank.process.join(_GRACE_S)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.connection.close()
        rank.process.close()


def host_store(size: int, timeout_s: float) -> tuple[TCPStore, int]:
    """Make a store that only this machine can reach, for ranks that are launched next.

    Raises:
        BackendUnavailable: this machine cannot reach it either. OSError: too few descriptors may be
            opened.
    """
    check_descriptors(_DESCRIPTORS + _DESCRIPTORS_A_RANK * size, f"launching {size} ranks")
    check_loopback()
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
            use_libuv=torch.__version__ >= "2.9",  # as versions; 2.6 takes no socket there
        )
    return store, port


def _rank_main(job: _Job, connection: Connection) -> None:
    """Run a rank process, from start to end."""
    fork_server.leave_ctrl_c_to_parent()
    Thread(_die_with, job.launcher, name="mkernel-die-with-launcher").start()
    _Channel.connection = connection
    try:
        connection.send_bytes(pickle.dumps(("begun", None)))
    except BrokenPipeError:  # the launcher was stopped as it started this process
        return
    size = job.nodes * job.ranks_per_node
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    os.environ.clear()
    os.environ.update(
        job.environment,
        RANK=str(job.rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(job.rank),
        LOCAL_WORLD_SIZE=str(size),
    )
    try:
        timeout = timedelta(seconds=job.settings.timeout_s)
        stores = [
            TCPStore("127.0.0.1", job.port, timeout=timeout, wait_for_workers=False)
            for _ in range(2)
        ]
        fn, args, kwargs = _unpacked(job.work)
        accelerator, nic, verbs = job.backends
        lifecycle.init(
            nodes=job.nodes,
            ranks_per_node=job.ranks_per_node,
            accelerator=accelerator,
            nic=nic,
            verbs=verbs,
            settings=job.settings,
            stores=(stores[0], stores[1]),
        )
        connection.send_bytes(pickle.dumps(("joined", None)))
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            try:
                lifecycle.finalize(error)
            except MkernelError:
                pass
            except Exception:  # the first error is the one to raise; this one is shown beside it
                traceback.print_exc()
            raise
        lifecycle.finalize()
        message: tuple[str, Any] = ("result", pickle.dumps(result))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = pickle.dumps(MkernelError(f"{type(error).__name__}: {error}"))
        message = ("error", (pickled, text))
    with suppress(BrokenPipeError):
        connection.send_bytes(pickle.dumps(message))
    connection.close()


def _unpacked(work: bytes) -> Any:
    """Return the function and arguments that :func:`launch` was given, found again by name."""
    try:
        return pickle.loads(work)
    except (AttributeError, ImportError) as error:
        raise ArgumentError(
            "fn",
            "a function or an argument",
            "what each rank finds as it imports the script: defined in a module, or in the script "
            'above `if __name__ == "__main__":` and not under it',
            why=str(error),
        ) from error


def _die_with(launcher: int) -> None:
    """End this process when its launcher is gone.

    A rank without its launcher has nobody to report to, and would outlive the user's shell. (The
    fork server is no help: every rank holds the pipe that keeps it alive.)
    """
    with suppress(ProcessLookupError):
        try:
            process = os.pidfd_open(launcher)
        except ProcessLookupError:
            raise
        except OSError:  # no descriptor is left, or a sandbox has no such call
            while True:
                os.kill(launcher, 0)
                time.sleep(1.0)
        gone = select.poll()
        gone.register(process, select.POLLIN)
        gone.poll()
    os.kill(os.getpid(), signal.SIGKILL)
