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
        rank=0, size=3, bootstrap=Bootstrap(), wait_s=lambda: 7.0, check_peers=peers
    )
    exchange = Exchange(failure)
    exchange.collect("topic")
    exchange.collect("topic", ranks=[2], check=own)
    assert seen == [("topic", [0, 1, 2], 7.0, peers), ("topic", [2], 7.0, own)]


def test_each_time_has_keys_of_its_own_and_all_but_the_last_two_are_forgotten() -> None:
    log: list[tuple[str, str]] = []
    bootstrap = SimpleNamespace(
        publish=lambda key, value: log.append(("publish", key)),
        collect=lambda key, *_: log.append(("collect", key)) or {},
        forget=lambda key: log.append(("forget", key)),
    )
    failure: Any = SimpleNamespace(
        rank=1, size=2, bootstrap=bootstrap, wait_s=lambda: 7.0, check_peers=None
    )
    exchange = Exchange(failure)
    for topic in ("plan", "plan", "other", "plan", "plan"):
        exchange.gather(topic, 5)
    assert [key for what, key in log if what == "publish"] == [
        "plan/0/1", "plan/1/1", "other/0/1", "plan/2/1", "plan/3/1",
    ]  # fmt: skip
    assert [key for what, key in log if what == "forget"] == ["plan/0/1", "plan/1/1"]
    assert [key for what, key in log if what == "collect"][-1] == "plan/3"


def test_a_barrier_waits_for_the_others_and_names_them() -> None:
    seen: list[tuple[str, str]] = []

    def collect(key: str, ranks: Any, timeout_s: float, check: Any, late: str) -> dict[int, bool]:
        seen.append((key, late))
        return {}

    bootstrap = SimpleNamespace(
        publish=lambda key, value: seen.append((key, repr(value))), collect=collect
    )
    failure: Any = SimpleNamespace(
        rank=1, size=2, bootstrap=bootstrap, wait_s=lambda: 7.0, check_peers=None
    )
    Exchange(failure).barrier()
    late = "ranks {missing} did not come to a barrier, or to the end"
    assert seen == [("barrier/0/1", "True"), ("barrier/0", late)]
