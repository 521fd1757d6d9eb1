"""The torch.distributed group of a world whose accelerator backend leaves its traffic to torch.

Torch has one default group a process. Where there is none the first world makes it; it then stays until
the last world with a group ends, because torch destroys all groups along with the default one. Every
other world gets a group beside the default one, the user's or ours, by the world's own sealed store.
"""

from __future__ import annotations

import base64
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

from torch import distributed
from torch.distributed import GroupMember, PrefixStore, ProcessGroup, Store, distributed_c10d

from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.errors import Unsupported
from mkernel.host_limits import check_descriptors, check_gloo_interfaces
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.failure import FailureMonitor


class GroupStore(Store):
    """Keys of process groups as sealed messages of a world. Torch calls it from C++, on any thread;
    whoever makes it keeps it for as long as a group may use it.

    Libraries exchange their addresses and ids through it (gloo's sockets, NCCL's unique id), which a
    stranger who reaches the store must neither read nor replace.

    Args:
        check: called between polls of a wait; raises to end it.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        super().__init__()
        self._bootstrap = bootstrap
        self._timeout_s = timeout_s
        self._check = check
        self._least_s = 0.0

    def set(self, key: str, value: str | bytes) -> None:
        """Publish a value."""
        self._bootstrap.publish(_name(key), _encoded(value))

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value. Timeout, Untrusted, what ``check`` raises."""
        return base64.b64decode(self._collect([key], self._timeout_s)[key])

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there. Untrusted."""
        return all(self._bootstrap.peek(_name(key)) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there. Timeout, Untrusted, what ``check`` raises."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._collect(keys, max(limit_s, self._least_s))

    @contextlib.contextmanager
    def waiting_at_least(self, seconds: float) -> Iterator[None]:
        """Give every wait inside of it so much time, also where a caller asks for less."""
        self._least_s = seconds
        try:
            yield
        finally:
            self._least_s = 0.0

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Publish ``desired`` if the key has the value ``expected`` (empty: none), and return the value
        that it has now; ``expected`` where it has none. Untrusted."""
        known = _encoded(expected)
        told = self._bootstrap.replace(_name(key), known or None, _encoded(desired))
        return base64.b64decode(known if told is None else told)

    def delete_key(self, key: str) -> bool:
        """Delete a key, if it is there."""
        self._bootstrap.forget(_name(key))
        return True

    deleteKey = delete_key  # the name by which torch's C++ calls it

    def _collect(self, keys: Sequence[str], limit_s: float) -> dict[str, Any]:
        return self._bootstrap.collect(
            "group",
            keys,
            limit_s,
            lambda missing: self._check(),
            late="no rank wrote {missing} for the process group",
        )

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long ``get`` and ``wait`` wait by default."""
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """Return how long ``get`` and ``wait`` wait by default."""
        return timedelta(seconds=self._timeout_s)

    def clone(self) -> GroupStore:
        """Return this store, which is safe to use from several threads."""
        return self

    def add(self, key: str, amount: int) -> NoReturn:
        """Raise Unsupported: the store itself adds, so that the sum cannot be signed."""
        raise Unsupported(f"key {key!r}: a counter of the store cannot be signed")


def innermost(store: Store) -> Store:
    """Return the store below all prefixes. Torch does not keep a store alive that is written in
    Python: its user has to."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _name(key: str) -> str:
    return f"group/{key}"


def _encoded(value: str | bytes) -> str:
    """Return a value as JSON can hold it."""
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


_DESCRIPTORS = 6
"""Descriptors that a group of gloo has open beside a connection to each rank: three that stay, and some
more while ranks connect. Where none is left its thread that accepts connections would end the
process."""
_GLOO_CONNECTS = 5
"""The multiple of its timeout for which gloo waits for a rank that is to connect to this one
(``waitUntil`` in its ``transport/tcp/pair.h``): where that rank is dead, all the others do."""


class _Groups:
    """The groups that worlds of this process have made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._default: ProcessGroup | None = None  # where a world made it
        self._store: Store | None = None  # of that group, also when its world has ended
        self._in_use: set[ProcessGroup] = set()

    def made_default(self) -> bool:
        """Return whether torch's default group is one that a world made."""
        return self._default is not None and _default_group() is self._default

    def make(
        self,
        backend: str,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        options: Any,
        name: str,
    ) -> ProcessGroup:
        """Make a group named ``name``, or torch's default one where there is none. Collective."""
        with self._lock:
            before = _default_group()
            if before is None:
                with _counted_if_made():
                    distributed.init_process_group(
                        backend,
                        store=store,
                        rank=rank,
                        world_size=size,
                        timeout=timeout,
                        pg_options=options,
                    )
                made = self._default = _default_group()
                assert made is not None
                self._store = store
            else:
                made = _beside(before, backend, store, rank, size, timeout, options, name)
            self._in_use.add(made)
            return made

    def close(self, group: ProcessGroup) -> None:
        """Destroy a group; the default one goes with the last."""
        with self._lock:
            self._in_use.discard(group)
            if group is not self._default:
                with contextlib.suppress(ValueError):  # destroyed along with the default one
                    distributed.destroy_process_group(group)
            if not self._in_use:
                if self.made_default():
                    distributed.destroy_process_group()
                self._default = self._store = None


@contextlib.contextmanager
def _counted_if_made() -> Iterator[None]:
    """Take back torch's count of a group that failed, inside of it. Torch names default groups by that
    count, and ranks find each other in the store by the name; where a group failed, another rank may
    not have come so far as to count it."""
    before = distributed_c10d._world.group_count
    try:
        yield
    except BaseException:
        distributed_c10d._world.group_count = before
        raise


def _beside(
    default: ProcessGroup,
    backend: str,
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    options: Any,
    name: str,
) -> ProcessGroup:
    """Make a group that only its own ranks have to know of.

    Torch's ``new_group`` counts groups to name them, and splits communicators of the default group, so
    that *all* ranks have to call it alike. Without a default group it does neither.
    """
    named: Any = name  # newer torch has a type of its own for it
    GroupMember.WORLD = None
    try:
        made, _ = distributed_c10d._new_process_group_helper(
            size, rank, [], distributed.Backend(backend), store, named, options, timeout
        )
    finally:
        GroupMember.WORLD = default
    assert isinstance(made, ProcessGroup)
    distributed_c10d._world.pg_group_ranks[made] = {each: each for each in range(size)}
    return made


def _default_group() -> ProcessGroup | None:
    return GroupMember.WORLD


_groups = _Groups()


def has_users_default() -> bool:
    """Return whether the program itself has initialized torch.distributed."""
    return (
        distributed.is_available() and distributed.is_initialized() and not _groups.made_default()
    )


def open_group(
    accelerator: AcceleratorBackend,
    rank: int,
    size: int,
    store: GroupStore,
    timeout_s: float,
    *,
    prefix: str,
    name: str,
    one_host: bool,
    undo: contextlib.ExitStack,
) -> ProcessGroup:
    """Make a group of a world's ranks. Backends that ask for one leave all traffic to it, between
    nodes too.

    Args:
        store: carries the addresses that the ranks exchange, under keys with ``prefix``.
        name: of the group, where it is not torch's default one; no other group has it.
        undo: gets what destroys the group.

    Raises:
        OSError: the process may not open as many descriptors as that takes. ArgumentError:
            GLOO_SOCKET_IFNAME names no interface of this host.
    """
    check_descriptors(size + _DESCRIPTORS, f"a process group of {size} ranks")
    gloo = accelerator.collectives == "gloo"
    if gloo:
        check_gloo_interfaces()
    wait = timedelta(seconds=timeout_s)
    if not gloo:
        # Calls end by the backend's own deadline. A library that runs messages as kernels must
        # not come first: it would take the process down, or let the stream go on without data.
        wait *= 3
    connect = wait / _GLOO_CONNECTS if gloo else wait
    with (
        _loopback() if one_host else contextlib.nullcontext(),
        store.waiting_at_least(timeout_s),
    ):
        group = _groups.make(
            accelerator.collectives,
            PrefixStore(prefix, store) if prefix else store,
            rank,
            size,
            connect,
            accelerator.group_options(connect),
            name,
        )
    undo.callback(_groups.close, group)
    if gloo:
        _set_timeout(wait, group)
    return group


def _set_timeout(timeout: timedelta, group: ProcessGroup) -> None:
    """Set a group's timeout by the function that torch has since 2.14, or by the private one before."""
    function: Any = getattr(distributed, "set_timeout", None) or distributed_c10d._set_pg_timeout
    function(timeout, group)


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Keep gloo from looking up the host's name, which need not resolve, inside of it. It stays so for
    the groups that a program makes in a default group of ours; other groups may span hosts."""
    chosen = "GLOO_SOCKET_IFNAME" in os.environ
    ours = _default_group() is None
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        yield
    finally:
        if not (chosen or ours):
            del os.environ["GLOO_SOCKET_IFNAME"]


def group_store(failure: FailureMonitor) -> GroupStore:
    """Return the store through which process groups of a world's ranks exchange addresses."""

    def check() -> None:
        if failure.notice is not None:
            raise failure.notice.error()

    return GroupStore(failure.bootstrap.shared(), failure.timeout_s, check)
