"""The kit's largest world has as many ranks as are claimed and fit."""

from __future__ import annotations

import pytest

from mkernel.conformance.accelerator import AcceleratorSubject
from mkernel.harness.outcome import CheckSkipped


def subject(most_ranks: int | None, room: int | None) -> AcceleratorSubject:
    made = AcceleratorSubject("streams", quick=True)
    claims = made.backend.capabilities().model_copy(update={"most_ranks": most_ranks})
    made.__dict__.update(capabilities=claims, room=room)
    return made


@pytest.mark.parametrize(
    ("most_ranks", "room", "ranks"),
    [(None, None, 16), (12, None, 12), (1024, None, 32), (None, 8, 8), (16, 16, 16), (6, 8, 6)],
)
def test_it_has_as_many_as_are_claimed_and_fit(
    most_ranks: int | None, room: int | None, ranks: int
) -> None:
    assert subject(most_ranks, room).crowd() == (1, ranks)


@pytest.mark.parametrize(("most_ranks", "room"), [(None, 2), (4, None), (16, 4), (2, 8)])
def test_what_other_checks_have_is_not_tried_again(
    most_ranks: int | None, room: int | None
) -> None:
    with pytest.raises(CheckSkipped, match="ranks"):
        subject(most_ranks, room).crowd()


@pytest.mark.parametrize(("most_ranks", "largest"), [(2, (1, 2)), (3, (1, 3)), (4, (2, 2))])
def test_no_check_has_more_ranks_than_are_claimed(
    most_ranks: int, largest: tuple[int, int]
) -> None:
    assert subject(most_ranks, None).largest() == largest
