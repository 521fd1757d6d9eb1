"""The kit's largest world has as many ranks as are claimed and fit."""

from __future__ import annotations

import pytest

from mkernel.conformance.accelerator import AcceleratorSubject
from mkernel.conformance.checks.values import most_ranks as check_most_ranks
from mkernel.harness.outcome import CheckSkipped


def subject(most_ranks: int | None, room: int | None, quick: bool = True) -> AcceleratorSubject:
    made = AcceleratorSubject("streams", quick)
    claims = made.capabilities.model_copy(update={"most_ranks": most_ranks})
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


@pytest.mark.parametrize(
    ("quick", "most_ranks", "between_nodes", "worlds"),
    [
        (True, 16, True, [(1, 16)]),
        (False, 16, True, [(1, 16), (2, 8), (4, 4)]),
        (False, 64, True, [(1, 32), (2, 8), (4, 4)]),
        (False, 16, False, [(1, 16)]),
        (False, 12, True, [(1, 12)]),
    ],
)
def test_16_ranks_are_tried_on_several_nodes_too(
    quick: bool,
    most_ranks: int,
    between_nodes: bool,
    worlds: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = subject(most_ranks, None, quick=quick)
    tried.__dict__["between_nodes"] = between_nodes
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(AcceleratorSubject, "judge", lambda self, *_, world: seen.append(world))
    check_most_ranks(tried)
    assert seen == worlds


@pytest.mark.parametrize(("most_ranks", "largest"), [(2, (1, 2)), (3, (1, 3)), (4, (2, 2))])
def test_no_check_has_more_ranks_than_are_claimed(
    most_ranks: int, largest: tuple[int, int]
) -> None:
    assert subject(most_ranks, None).largest() == largest
