"""What a process group asks of its process, and what one that is not made leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import HashStore, ProcessGroup, distributed_c10d

from mkernel.world import process_group
from mkernel.world.bootstrap import Bootstrap
from mkernel.world.process_group import GroupStore, _Groups, _loopback, open_group

_FROM_LOOPBACK = re.compile(rb"(\x02\x00)..(\x7f\x00\x00\x01)", re.DOTALL)
"""A `sockaddr_in` of 127.0.0.1: its family, port and address."""


def nothing(group: ProcessGroup) -> None:
    """No look at it."""


def opened(
    size: int,
    timeout_s: float = 0.2,
    look: Callable[[ProcessGroup], None] = nothing,
    kind: type[GroupStore] = GroupStore,
) -> None:
    """Rank 0 of a group whose other ranks do not come. ``look``: at the group. ``kind``: of store."""
    accelerator: Any = Mock(collectives="gloo", group_options=Mock(return_value=None))
    store = kind(Bootstrap(HashStore()), timeout_s, lambda: None)
    with contextlib.ExitStack() as undo:
        look(
            open_group(
                accelerator,
                0,
                size,
                store,
                timeout_s,
                prefix="",
                name="x",
                one_host=True,
                undo=undo,
            )
        )


class OfOneThatDied(GroupStore):
    """Rank 1 died between telling its address, which it did ``late_s`` after rank 0, and connecting to
    rank 0."""

    late_s = 0.0

    def set(self, key: str, value: str | bytes) -> None:
        super().set(key, value)
        # Its port is the highest that there is: of two ranks gloo has the one with the lower port wait.
        address, found = _FROM_LOOPBACK.subn(b"\\1\xff\xff\\2", bytes(value))  # type: ignore[arg-type]
        assert found == 1
        tell = super().set
        timer = threading.Timer(self.late_s, lambda: tell(key.removesuffix("0") + "1", address))
        timer.start()


class OfOneThatDiedLate(OfOneThatDied):
    """Later than what gloo is given for a step, and within the deadline."""

    late_s = 1.5


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[int]:
    """The process may open so many more; gives its limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(each) for each in os.listdir("/proc/self/fd")}
    free = (number for number in range(before[0]) if number not in taken)
    limit = 1 + [next(free) for _ in range(count)][-1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_too_few_descriptors_are_refused_before_gloo_ends_the_process() -> None:
    with descriptors_left(8) as limit, pytest.raises(OSError, match="Errno 24") as refused:
        opened(64)
    told = str(refused.value)
    assert "a process group of 64 ranks opens 70 descriptors" in told
    assert f"raise the limit of {limit} (`ulimit -n`)" in told


def test_a_group_that_is_not_made_is_not_counted() -> None:
    """Else its rank would look for the next one under another name than ranks that came less far."""
    before = distributed_c10d._world.group_count
    with pytest.raises(RuntimeError):
        opened(2)
    assert distributed_c10d._world.group_count == before


@pytest.mark.parametrize("kind", [OfOneThatDied, OfOneThatDiedLate])
def test_a_rank_that_dies_before_it_connects_is_not_waited_for_longer_than_the_deadline(
    kind: type[OfOneThatDied],
) -> None:
    """Gloo waits for five times its timeout there, which would be 15 s."""
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="Connect timeout"):
        opened(2, 3.0, kind=kind)
    assert 2.5 < time.monotonic() - start - kind.late_s < 14


def test_calls_have_the_whole_time() -> None:
    def look(group: ProcessGroup) -> None:
        backend: Any = group._get_backend(torch.device("cpu"))
        if not hasattr(backend, "options"):
            pytest.skip("this torch does not show the options of its groups")
        assert backend.options._timeout == timedelta(seconds=20)

    opened(1, 20.0, look)


def test_the_time_is_set_by_the_function_that_this_torch_does_not_warn_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The private one warns since torch 2.14, which has a public one."""
    chosen: list[timedelta] = []
    monkeypatch.setattr(
        torch.distributed, "set_timeout", lambda time, group: chosen.append(time), raising=False
    )
    monkeypatch.delattr(distributed_c10d, "_set_pg_timeout")
    opened(1, 20.0)
    assert chosen == [timedelta(seconds=20)]


def made(groups: _Groups, name: str) -> ProcessGroup:
    """A group of this process alone."""
    return groups.make("gloo", HashStore(), 0, 1, timedelta(seconds=60), None, name)


@pytest.mark.parametrize("default_ends_first", [False, True])
def test_the_default_group_goes_with_the_last(default_ends_first: bool) -> None:
    groups = _Groups()
    assert not groups.made_default()
    one, other = made(groups, "one"), made(groups, "other")
    there = distributed_c10d._world.pg_map
    assert groups.made_default()
    groups.close(one if default_ends_first else other)
    assert torch.distributed.is_initialized()
    assert one in there, "groups of a program may stand on it"
    assert (other in there) == default_ends_first
    groups.close(other if default_ends_first else one)
    assert not torch.distributed.is_initialized()
    assert not groups.made_default()


def test_a_default_group_of_the_program_stays() -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        groups = _Groups()
        groups.close(made(groups, "ours"))
        assert torch.distributed.is_initialized()
        assert not groups.made_default()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("chosen", ["", "eth0"])
@pytest.mark.parametrize("programs", [False, True])
def test_the_interface_of_gloo(
    chosen: str, programs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept for what a program makes in a default group of ours; its own groups may span hosts."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)  # undone however the test leaves it
    if not chosen:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    default = object() if programs else None
    monkeypatch.setattr(process_group, "_default_group", lambda: default)
    with _loopback():
        assert os.environ["GLOO_SOCKET_IFNAME"] == (chosen or "lo")
    assert os.environ.get("GLOO_SOCKET_IFNAME", "") == (chosen or ("" if programs else "lo"))
