"""Errors keep their type, text and fields when they travel from a rank to its launcher."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from mkernel import errors
from mkernel.world.watchdog import Notice

DIAGNOSIS = errors.Diagnosis(2, "compute_kernel", 5, 17, 3, 4, 9, 8, 1)
ERRORS = [
    errors.ArgumentError("m", 3, "a multiple of 4", why="4 ranks"),
    errors.ShapeError("b", "Tensor(...)", "[K, N]"),
    errors.DtypeError("a.dtype", "torch.int8", "one of float16"),
    errors.UnknownOp("op", "'conv'", "one of ..."),
    errors.PlanMismatch((0, 2), "shape.n", (8, 16)),
    errors.Timeout("late", DIAGNOSIS),
    errors.PeerFailure("rank 3 died", 3),
    errors.NicError("broken", status="REM_ACCESS_ERR", qp=7, wr_id=9, vendor_err=136, peer=1),
    errors.Cancelled("stopped"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_pickle_keeps_everything(error: errors.MkernelError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize(
    "error", [e for e in ERRORS if isinstance(e, errors.WorldError)], ids=lambda e: type(e).__name__
)
def test_every_rank_raises_the_same_kind(error: errors.WorldError) -> None:
    told = Notice.from_json(Notice.from_error(0, error).to_json()).error()
    assert type(told) is type(error)
    for name, value in vars(error).items():
        assert getattr(told, name) == value


def test_any_other_error_becomes_a_peer_failure() -> None:
    told = Notice.from_error(2, ValueError("boom")).error()
    assert isinstance(told, errors.PeerFailure)
    assert told.peer == 2
    assert "ValueError: boom" in str(told)


def test_diagnosis_names_everything() -> None:
    text = str(DIAGNOSIS)
    for part in ("rank 2", "compute_kernel", "block 5", "chunk 8", "rank 1", "signal 17", "saw 3",
                 "wanted 4", "call 9"):  # fmt: skip
        assert part in text


def test_what_is_no_numbered_signal_is_named() -> None:
    ended = replace(DIAGNOSIS, signal=0xFFFFFFFF)
    full = replace(DIAGNOSIS, signal=0xFFFFFFFE)
    mail = replace(DIAGNOSIS, signal=0xFFFFFFFD)
    own = replace(DIAGNOSIS, signal=0xFFFFFFFC)
    assert "on the signal that it is done with a call: saw 3" in str(ended)
    assert "on sums that are a signal themselves: saw 3" in str(mail)
    assert "on what other blocks of its own kernel prepare: saw 3" in str(own)
    assert "on the signal that the command FIFO has room: saw 3" in str(full)


def test_argument_errors_are_value_errors_too() -> None:
    assert issubclass(errors.ShapeError, ValueError)
    assert issubclass(errors.DtypeError, TypeError)
    assert issubclass(errors.Timeout, TimeoutError)
