"""Rank processes that are kept over the tests of a session: each call has a world of its own in them.

A process that starts a GPU's context, loads its libraries and lets go of them again takes seconds, and
more where others do so at the same time; a world takes some of a second. Kept are processes of a few
kinds (:class:`Kind`), the latest used. Where a call fails, or a rank dies, its processes are not used
again. What a test leaves in a process, as a patched module, other tests must not see: such tests, and
those that kill ranks or judge what processes hold, use :func:`mkernel.launch`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import queue
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from in_world import DEADLINE_S, TOLD_S, stores
from pydantic import SecretStr
from torch.distributed import TCPStore

import mkernel
from mkernel.errors import MkernelError, PeerFailure, Timeout
from mkernel.launch import host_store, launch, report
from mkernel.settings import load as load_settings

MOST_KINDS = 6
"""Whose processes are kept at once: two paths and two sizes of worlds, and some."""
FRESH = "FRESH_RANKS"
"""With this in the environment each call has processes of its own: is a failure of what was kept?"""
OVERDUE_S = 2 * DEADLINE_S
"""What a call may take, whose waits each have ``TOLD_S``."""
_READ_BY_PROCESSES = ("MKERNEL_", "CUDA_", "NCCL_", "TORCH_", "PYTORCH_")
_IDLE = timedelta(hours=6)


@dataclass(frozen=True)
class Kind:
    """Processes with which a call may be run. ``environment``: what is read once in a process."""

    nodes: int
    ranks_per_node: int
    accelerator: str | None
    nic: str | None
    verbs: str | None
    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Call:
    work: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
    kind: Kind
    timeout_s: float
    port: int
    secret: str


class _Ranks:
    """The processes of one kind."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.size = kind, kind.nodes * kind.ranks_per_node
        self._store, self._port = host_store(self.size, _IDLE.total_seconds())
        self._told: queue.Queue[tuple[int, Any]] = queue.Queue()
        self._calls = 0
        self.pids: dict[int, int] = {}
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()
        while len(self.pids) < self.size:
            rank, pid = self._next(time.monotonic() + OVERDUE_S)
            self.pids[rank] = pid

    def call(self, work: Any, timeout_s: float) -> list[Any]:
        """The ranks' results. Raises what the first one raised of its own, not of another's failure."""
        made, port = host_store(self.size, timeout_s)
        call = _Call(work, self.kind, timeout_s, port, secrets.token_hex(32))
        with tempfile.NamedTemporaryFile() as file:  # a store takes no large values
            pickle.dump(call, file)
            file.flush()
            self._store.set(f"call/{self._calls}", file.name)
            self._calls += 1
            found, failed = self._answers()
        del made
        if failed:
            raise min(failed, key=lambda error: isinstance(error, PeerFailure))
        return [found[rank] for rank in range(self.size)]

    def _answers(self) -> tuple[dict[int, Any], list[BaseException]]:
        """Each rank's result, and what was raised."""
        found: dict[int, Any] = {}
        failed: list[BaseException] = []
        until = time.monotonic() + OVERDUE_S
        while len(found) < self.size:
            try:
                rank, (error, found[rank]) = self._next(until)
            except Exception as died:
                failed.append(died)
                break
            if error is not None:
                failed.append(error)
        return found, failed

    def _next(self, until: float) -> tuple[int, Any]:
        try:
            rank, told = self._told.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise Timeout(f"kept ranks said nothing for {OVERDUE_S:g} s: {self.kind}") from None
        if isinstance(told, BaseException):
            raise told
        return rank, told

    def close(self) -> None:
        """End the processes."""
        with suppress(RuntimeError):  # of the store
            self._store.set(f"call/{self._calls}", "")
        self._thread.join(30)
        if self._thread.is_alive():
            for pid in self.pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._thread.join()

    def _run(self) -> None:
        kind = self.kind
        try:
            launch(
                _serve, self._port,
                nodes=kind.nodes, ranks_per_node=kind.ranks_per_node, accelerator=kind.accelerator,
                nic=kind.nic, verbs=kind.verbs, timeout_s=DEADLINE_S,
                on_report=lambda rank, told: self._told.put((rank, told)),
            )  # fmt: skip
        except BaseException as error:
            self._told.put((-1, error))


@dataclass
class _Kept:
    ranks: dict[Kind, _Ranks] = field(default_factory=dict)  # the latest used last


_kept = _Kept()


def right(world: int, fn: Any, *arguments: Any, accelerator: str = "hopper") -> None:
    """No rank of a node's world found a failure."""
    none_failed(run(fn, *arguments, ranks_per_node=world, accelerator=accelerator))


def none_failed(found: Sequence[Sequence[str]]) -> None:
    """``found``: by rank."""
    failures = [text for each in found for text in each]
    assert not failures, f"{len(failures)} failures: " + "; ".join(failures[:5])


def run(
    fn: Callable[..., Any],
    *args: Any,
    nodes: int = 1,
    ranks_per_node: int = 1,
    accelerator: str | None = None,
    nic: str | None = None,
    verbs: str | None = None,
    timeout_s: float = TOLD_S,
    **kwargs: Any,
) -> list[Any]:
    """As :func:`mkernel.launch`, in processes that are kept. Timeout: of a rank that hangs."""
    read = sorted(
        (name, value) for name, value in os.environ.items() if name.startswith(_READ_BY_PROCESSES)
    )
    kind = Kind(nodes, ranks_per_node, accelerator, nic, verbs, tuple(read))
    if os.environ.get(FRESH):
        return launch(
            fn, *args, nodes=nodes, ranks_per_node=ranks_per_node, accelerator=accelerator, nic=nic,
            verbs=verbs, timeout_s=timeout_s, **kwargs,
        )  # fmt: skip
    pickle.dumps((fn, args, kwargs))  # what cannot travel is the test's fault, not the processes'
    ranks = _kept.ranks.pop(kind, None)
    while ranks is None and len(_kept.ranks) >= MOST_KINDS:
        _kept.ranks.pop(next(iter(_kept.ranks))).close()
    ranks = ranks or _Ranks(kind)
    try:
        found = ranks.call((fn, args, kwargs), timeout_s)
    except BaseException:
        ranks.close()
        raise
    _kept.ranks[kind] = ranks
    return found


def processes() -> set[int]:
    """Those that are kept."""
    return {pid for ranks in _kept.ranks.values() for pid in ranks.pids.values()}


def close() -> None:
    """Keep none any more."""
    while _kept.ranks:
        _kept.ranks.popitem()[1].close()


def _serve(port: int) -> None:
    """What kept processes run: calls, until there is nothing in one."""
    mkernel.finalize()
    # Semaphores of Inductor live as long as the process; tests/conftest.py looks for another prefix.
    process: Any = multiprocessing.current_process()
    process._config["semprefix"] = f"/mp-of-tests-kept-{os.getpid()}"
    store = TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=_IDLE)
    report(os.getpid())
    number = 0
    while name := store.get(f"call/{number}").decode():
        number += 1
        environment = dict(os.environ)
        try:
            call = pickle.loads(Path(name).read_bytes())
            told: tuple[BaseException | None, Any] = (None, _called(call))
        except BaseException as error:
            told = (_that_travels(error), None)
        os.environ.clear()
        os.environ.update(environment)
        report(told)
        if told[0] is not None:
            return
        if "torch._dynamo" in sys.modules:  # limits of recompilation are a process's
            torch._dynamo.reset()
        if torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.empty_cache()


def _called(call: _Call) -> Any:
    """The result of this rank, in a world of the call's."""
    kind, (fn, args, kwargs) = call.kind, call.work
    mkernel.init(
        nodes=kind.nodes,
        ranks_per_node=kind.ranks_per_node,
        accelerator=kind.accelerator,
        nic=kind.nic,
        verbs=kind.verbs,
        settings=load_settings().model_copy(update={"job_secret": SecretStr(call.secret)}),
        timeout_s=call.timeout_s,
        stores=stores(call.port),
    )
    try:
        result = fn(*args, **kwargs)
    except BaseException as error:
        with suppress(MkernelError):
            mkernel.finalize(error)
        raise
    mkernel.finalize()
    return result


def _that_travels(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return MkernelError(f"{type(error).__name__}: {error}")
    return error
