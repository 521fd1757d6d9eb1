"""How often a world's kinds, placement and routes are found, whoever asks for them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from mkernel.plan import planner
from mkernel.topology import kinds, placement, routing

RESULTS = {"kinds": (kinds, "NodeKinds"), "place": (placement, "WorldPlacement")}
RESULTS["routes"] = (routing, "RouteTable")
"""What the functions return, and make once a call, by the name under which they find its class."""


@contextlib.contextmanager
def found() -> Iterator[Counter[str]]:
    """Counts calls of ``node_kinds``, ``place`` and ``routes`` by anybody, however imported. Plans keep
    equal worlds: those of earlier tests are forgotten."""
    for cache in (planner._plans, planner._planned, planner._links):
        cache.cache_clear()
    counts: Counter[str] = Counter()

    def counting(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **fields: Any) -> Any:
            counts[name] += 1
            return made(*args, **fields)

        return make

    with contextlib.ExitStack() as patches:
        for name, (module, result) in RESULTS.items():
            made = counting(name, getattr(module, result))
            patches.enter_context(patch.object(module, result, made))
        yield counts
