"""Why a world ended, from the rank that knows to all others: the same error there, or Untrusted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mkernel.errors import Cancelled, NicError, PeerFailure, Timeout, Untrusted, WorldError
from mkernel.world.watchdog import Notice

NIC = {"status": "RETRY_EXC_ERR", "qp": 7, "wr_id": 9, "vendor_err": 1, "peer": 2}


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Timeout("late", None), Timeout),
        (NicError("broken", **NIC), NicError),
        (PeerFailure("gone", 5), PeerFailure),
        (Cancelled("stopped"), Cancelled),
        (KeyboardInterrupt(), Cancelled),
        (Untrusted("forged"), Untrusted),
        (ZeroDivisionError("0"), PeerFailure),
    ],
)
def test_every_rank_raises_the_error_of_the_one_that_failed(
    error: BaseException, told: type[WorldError]
) -> None:
    notice = Notice.from_error(3, error)
    heard = Notice.from_json(json.loads(json.dumps(notice.to_json())))
    assert heard == notice
    found = heard.error()
    assert type(found) is told
    if isinstance(found, NicError):
        assert {name: getattr(found, name) for name in NIC} == NIC
    if isinstance(found, PeerFailure):
        assert found.peer == (5 if isinstance(error, PeerFailure) else 3)


@pytest.mark.parametrize("wrong", [{"kind": "Surprise"}, {"rank": "1"}, {"details": {"x": 1}}])
def test_what_no_rank_writes_is_untrusted(wrong: dict[str, Any]) -> None:
    notice = Notice.from_error(1, NicError("broken", **NIC)).to_json()
    assert Notice.from_json(notice).rank == 1
    with pytest.raises(Untrusted, match="that no rank writes"):
        Notice.from_json({**notice, **wrong})
