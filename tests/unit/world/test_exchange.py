"""What a wait for other ranks looks at meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mkernel.world.exchange import Exchange


def test_a_wait_ends_with_the_world_unless_it_is_told_what_to_look_at() -> None:
    seen: list[Any] = []

    class Bootstrap:
        def collect(self, key: str, ranks: Any, timeout_s: float, check: Any, late: str) -> Any:
            seen.append((key, list(ranks), timeout_s, check))
            return {}

    def peers() -> None:
        """What a failure monitor looks at."""

    def own() -> None:
        """What a caller looks at."""

    failure: Any = SimpleNamespace(
        rank=0, size=3, bootstrap=Bootstrap(), timeout_s=7.0, check_peers=peers
    )
    exchange = Exchange(failure)
    exchange.collect("topic")
    exchange.collect("topic", ranks=[2], check=own)
    assert seen == [("topic", [0, 1, 2], 7.0, peers), ("topic", [2], 7.0, own)]
