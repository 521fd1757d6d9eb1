"""Failures: each has its own status, sets the abort word in time, and the session still closes."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import pytest
from nic_ranks import DEADLINE_S, Rank, join, local_ranks

from mkernel.backends.nics.efa import EfaNic
from mkernel.backends.transport import _transport
from mkernel.errors import NicError
from mkernel.harness.nic_ranks import CLOSE_S, within


def failed(rank: Rank) -> NicError:
    """The session's failure; the abort word must say nic_error."""
    assert rank.wait_abort() == _transport.AbortCode.nic_error
    failure = rank.session.failure()
    assert failure is not None
    return failure


def closes_at_once(rank: Rank) -> None:
    with within(CLOSE_S, "close"):
        rank.close()


def spoiled_rkey(key: str) -> str:
    parsed = json.loads(key)
    parsed["rkeys"][0] ^= 1
    return json.dumps(parsed)


def too_long(key: str) -> str:
    parsed = json.loads(key)
    parsed["nbytes"] *= 2
    return json.dumps(parsed)


@pytest.mark.parametrize(("change", "offset"), [(spoiled_rkey, 0), (too_long, 1 << 20)])
def test_forbidden_access_fails_both_sides(change, offset: int) -> None:
    a, b = Rank(0), Rank(1)
    join([a, b], change)
    before = b.fill(b.memory.nbytes)
    a.fill(100)
    a.session.put(1, 0, 0, offset, 100, 3, 1)
    failure = failed(a)
    assert (failure.status, failure.peer) == ("REM_ACCESS_ERR", 1)
    assert failure.qp > 0
    assert failure.vendor_err > 0
    assert "REM_ACCESS_ERR" in str(failure)
    assert failed(b).status in ("QP_ACCESS_ERR", "WR_FLUSH_ERR")
    assert b.read(b.memory.nbytes) == before
    assert b.count(3) == 0
    assert not a.session.flush(DEADLINE_S)
    with pytest.raises(NicError, match="REM_ACCESS_ERR"):
        a.session.put(1, 0, 0, 0, 8, 0, 1)
    closes_at_once(a)
    closes_at_once(b)


def test_over_srd_a_wrong_key_fails_its_sender() -> None:
    with local_ranks(backend=EfaNic(), change_key=spoiled_rkey) as (a, b):
        a.session.put(1, 0, 0, 0, 8, 0, 1)
        failure = failed(a)
        assert (failure.status, failure.peer) == ("REM_ACCESS_ERR", 1)
        assert b.count(0) == 0


def test_an_aborted_world_is_left_alone() -> None:
    with local_ranks() as (a, b):
        _transport.pad_abort(a.pad, _transport.AbortCode.cancelled)
        with pytest.raises(NicError, match="aborted"):
            a.session.put(1, 0, 0, 0, 8, 0, 1)
        assert a.session.failure() is None
        time.sleep(0.05)
        assert b.count(0) == 0


def test_the_first_error_stays() -> None:
    a, b = Rank(0), Rank(1)
    join([a, b], spoiled_rkey)
    with suppress(NicError):  # once the first has failed
        for _ in range(50):
            a.session.put(1, 0, 0, 0, 8, 0, 1)
    assert failed(a).status == "REM_ACCESS_ERR"
    time.sleep(0.05)  # fifty flushes come after it
    failure = a.session.failure()
    assert failure is not None
    assert failure.status == "REM_ACCESS_ERR"
    a.close()
    b.close()
    assert a.session.failure() is not None
