"""The torch.distributed group of a world whose accelerator backend leaves its traffic to torch.

Torch has one default group a process. Where the user made it, a world gets a group beside it. Else the
first world makes it, and further ones get groups of their own; it then stays until the last of these
worlds ends, because torch destroys all groups along with the default one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import GroupMember, ProcessGroup

from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.errors import ArgumentError
from mkernel.world.failure import FailureMonitor
from mkernel.world.group_store import GroupStore


class _Groups:
    """The groups that worlds of this process have made where the user had made no default group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._default: ProcessGroup | None = None
        self._in_use: set[ProcessGroup] = set()

    def is_default_ours(self) -> bool:
        """Whether torch's default group is one that a world made."""
        return self._default is not None and _default_group() is self._default

    def make(self, init: Callable[[], None]) -> ProcessGroup:
        """The group that ``init`` makes as torch's default one. Only the first stays the default."""
        with self._lock:
            before = _default_group()
            GroupMember.WORLD = None
            try:
                init()
                made = _default_group()
                assert made is not None
            finally:
                if before is not None:
                    GroupMember.WORLD = before
            if before is None:
                self._default = made
            self._in_use.add(made)
            return made

    def close(self, group: ProcessGroup) -> None:
        """Destroy a group; the default one goes with the last."""
        with self._lock:
            self._in_use.discard(group)
            if group is not self._default:
                with contextlib.suppress(ValueError):  # destroyed along with the default one
                    torch.distributed.destroy_process_group(group)
            if not self._in_use:
                if self.is_default_ours():
                    torch.distributed.destroy_process_group()
                self._default = None


def _default_group() -> ProcessGroup | None:
    return GroupMember.WORLD


_groups = _Groups()


def open_group(
    accelerator: AcceleratorBackend,
    rank: int,
    size: int,
    store: GroupStore,
    timeout_s: float,
    *,
    one_host: bool,
    undo: contextlib.ExitStack,
) -> ProcessGroup:
    """A group of a world's ranks. Backends that ask for one leave all traffic to it, between nodes too.

    Args:
        store: carries the addresses that the ranks exchange.
        undo: gets what destroys the group, unless it is part of a torch.distributed world of the user.
    """
    wait = timedelta(seconds=timeout_s)
    if accelerator.collectives != "gloo":
        # Calls end by the backend's own deadline. A library that runs messages as kernels must
        # not come first: it would take the process down, or let the stream go on without data.
        wait *= 3
    options = accelerator.group_options(wait)
    if torch.distributed.is_initialized() and not _groups.is_default_ours():
        found = torch.distributed.get_world_size()
        if found != size:
            raise ArgumentError(
                "WORLD_SIZE", size, f"{found}, the size of the torch.distributed world"
            )
        made: ProcessGroup = torch.distributed.new_group(
            backend=accelerator.collectives, timeout=wait, pg_options=options
        )
        return made
    if one_host:  # no look-up of the host's name, which needs not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    group = _groups.make(
        lambda: torch.distributed.init_process_group(
            accelerator.collectives,
            store=store,
            rank=rank,
            world_size=size,
            timeout=wait,
            pg_options=options,
        )
    )
    undo.callback(_groups.close, group)
    return group


def group_store(failure: FailureMonitor) -> GroupStore:
    """The store through which process groups of a world's ranks exchange addresses."""

    def check() -> None:
        if failure.notice is not None:
            raise failure.notice.error()

    return GroupStore(failure.bootstrap, failure.timeout_s, check)
