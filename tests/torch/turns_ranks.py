"""Run in the rank processes of test_turns: contenders that fail on one rank."""

from __future__ import annotations

from typing import Any

import torch
import turns
from torch_group import default_group


def planted() -> dict[str, dict[str, Any]]:
    """Return the entries of a call that runs, of one whose error differs by rank, and of others that
    cannot be had or are wrong on one rank."""
    with default_group(cuda=False):
        place = turns.Place(cuda=False)
        call = torch.ones(8).sum

        def fails(failure: Exception, rank: int) -> tuple[turns.Call, dict[str, Any]]:
            if place.rank == rank:
                raise failure
            return call, {}

        makers = {
            "runs": lambda: (call, {"error": float(place.rank), "parts": {"x": 1.0 - place.rank}}),
            "wrong": lambda: fails(turns.Unfit("wrong: result"), 1),
            "breaks": lambda: fails(ValueError("first line\nsecond"), 0),
        }
        return turns.of_contenders(makers, 3, place)
