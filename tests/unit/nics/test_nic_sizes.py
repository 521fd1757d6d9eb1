"""Puts whose offsets and sizes need more than 32 bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nic_ranks import local_ranks

from mkernel.backends.contracts.nic import NicBackend
from mkernel.backends.nics.cx7 import Cx7Nic
from mkernel.backends.nics.efa import EfaNic

BACKENDS = pytest.mark.parametrize("backend", [Cx7Nic(), EfaNic()], ids=["cx7", "efa"])
BEYOND = 2**32
SEED = 256 * 1024


@BACKENDS
def test_offsets_beyond_32_bits(backend: NicBackend) -> None:
    """The regions have pages where they are written alone."""
    with local_ranks(backend=backend, nbytes=BEYOND + 2 * SEED) as (a, b):
        for turn, (source, target) in enumerate(
            ((BEYOND + 64, BEYOND + SEED), (64, BEYOND - 32), (BEYOND - 32, 2**31 - 16)), 1
        ):
            sent = a.fill(SEED, source)
            a.session.put(1, 0, source, target, SEED, 3, 1)
            assert b.waits(3, turn)
            assert b.read(SEED, target) == sent
            assert not any(b.read(SEED, (target + SEED) % BEYOND)) or turn > 1


@BACKENDS
def test_a_put_beyond_the_region_is_refused_there_too(backend: NicBackend) -> None:
    """One byte too many at an end that 32 bits cannot say."""
    with local_ranks(backend=backend, nbytes=BEYOND + SEED) as (a, b):
        a.session.put(1, 0, 0, BEYOND + SEED - 8, 9, 3, 1)
        a.wait_abort()
        assert a.session.failure() is not None
        assert b.count(3) == 0


def _available() -> int:
    """Bytes that processes may still have without another's being written out."""
    told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(told["MemAvailable"].split()[0]) << 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [pytest.param(Cx7Nic(), marks=pytest.mark.long), EfaNic()],  # both cut puts in the same place
    ids=["cx7", "efa"],
)
def test_a_put_of_more_bytes_than_32_bits_count(backend: NicBackend) -> None:
    """Every 8 MiB of it are others: they begin with where they are."""
    nbytes = BEYOND + 4097
    if _available() < 2.5 * nbytes:
        pytest.skip(f"{2.5 * nbytes / 2**30:.0f} GiB of memory must be available")
    piece = np.frombuffer(bytearray(os.urandom(8 << 20)), dtype=np.uint8)

    def sent(at: int) -> Any:
        piece[:8].view(np.int64)[0] = at
        return piece[: nbytes - at]

    pieces = range(0, nbytes, len(piece))
    with local_ranks(backend=backend, nbytes=nbytes) as (a, b):
        for at in pieces:
            a.memory.bytes[at : at + len(piece)] = sent(at)
        a.session.put(1, 0, 0, 0, nbytes, 3, 1)
        assert b.waits(3, 1)
        for at in pieces:
            assert np.array_equal(b.memory.bytes[at : at + len(piece)], sent(at)), at
        assert a.session.flush(60)
        assert b.count(3) == 1
