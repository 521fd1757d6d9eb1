"""What a process group asks of its process, and what one that is not made leaves behind."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore, distributed_c10d

from mkernel.world.process_group import open_group


def opened(size: int, timeout_s: float = 0.2) -> None:
    """Rank 0 of a group whose other ranks do not come."""
    accelerator: Any = Mock(collectives="gloo", group_options=Mock(return_value=None))
    with contextlib.ExitStack() as undo:
        open_group(accelerator, 0, size, HashStore(), timeout_s, name="x", one_host=True, undo=undo)


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
