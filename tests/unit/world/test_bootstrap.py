"""Bootstrap messages: signed, waited for with a deadline, first writer wins."""

from __future__ import annotations

import threading
import time
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore

from mkernel.errors import PeerFailure, Timeout, Untrusted, WorldError
from mkernel.world.bootstrap import Bootstrap, wait_for


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def test_values_round_trip(store: HashStore) -> None:
    one, other = Bootstrap(store, b"secret"), Bootstrap(store, b"secret")
    assert other.peek("key") is None
    value = {"a": [1, "zwölf", None], "b": {"c": 2.5}}
    one.publish("key", value)
    assert other.peek("key") == value


def test_first_writer_wins(store: HashStore) -> None:
    one, other = Bootstrap(store, b"s"), Bootstrap(store, b"s")
    assert one.publish_first("abort", {"rank": 1}) == {"rank": 1}
    assert other.publish_first("abort", {"rank": 2}) == {"rank": 1}


def test_a_value_is_replaced_by_who_knows_it(store: HashStore) -> None:
    one, other = Bootstrap(store, b"s"), Bootstrap(store, b"s")
    assert one.replace("key", None, [1]) == [1]
    assert other.replace("key", [0], [2]) == [1]
    assert other.replace("key", [1], [2]) == [2]
    one.forget("key")
    assert one.replace("key", [2], [3]) is None
    assert one.peek("key") is None


def test_several_values_take_two_requests_where_all_are_there(store: HashStore) -> None:
    """A store may take several keys at once: torch's own do, one written in Python does not."""
    bootstrap = Bootstrap(Mock(wraps=store), b"s")
    asked = bootstrap._store
    assert isinstance(asked, Mock)
    keys = [f"x/{rank}" for rank in range(5)]
    for key in keys[1:]:
        bootstrap.publish(key, key)
    assert bootstrap.peek_all(keys) == {key: key for key in keys[1:]}
    bootstrap.publish(keys[0], keys[0])
    asked.reset_mock()
    assert bootstrap.peek_all(keys) == {key: key for key in keys}
    assert [each[0] for each in asked.method_calls] == ["has_extended_api", "check", "multi_get"]
    asked.has_extended_api = Mock(return_value=False)
    asked.reset_mock()
    assert bootstrap.peek_all(keys) == {key: key for key in keys}
    assert asked.check.call_count == asked.get.call_count == 5


def test_collect_waits_for_all(store: HashStore) -> None:
    bootstrap = Bootstrap(store)
    bootstrap.publish("x/0", "zero")
    timer = threading.Timer(0.1, lambda: bootstrap.publish("x/1", "one"))
    timer.start()
    assert bootstrap.collect("x", range(2), 30) == {0: "zero", 1: "one"}
    timer.join()


def test_collect_names_who_is_missing(store: HashStore) -> None:
    bootstrap = Bootstrap(store)
    bootstrap.publish("x/1", True)
    start = time.monotonic()
    with pytest.raises(Timeout, match=r"ranks \[0, 2\] did not reach 'x'"):
        bootstrap.collect("x", range(3), 0.2)
    assert time.monotonic() - start >= 0.2


def test_collect_can_be_interrupted(store: HashStore) -> None:
    def check(missing: set[int]) -> None:
        raise RuntimeError(f"broken while {missing} missing")

    with pytest.raises(RuntimeError, match=r"\{0\} missing"):
        Bootstrap(store).collect("x", range(1), 10, check)


def test_a_rank_that_published_and_left_was_not_too_early(store: HashStore) -> None:
    bootstrap = Bootstrap(store)
    bootstrap.publish("x/0", "zero")

    def look(missing: set[int]) -> None:
        assert missing == {1}
        bootstrap.publish("x/1", "one")  # after it was looked for, before it is known to be gone
        raise PeerFailure("rank 1 has left the world", 1)

    assert bootstrap.collect("x", range(2), 5, look) == {0: "zero", 1: "one"}


def test_a_rank_that_left_without_a_word_ends_the_wait(store: HashStore) -> None:
    def look(missing: set[int]) -> None:
        raise PeerFailure("rank 0 has left the world", 0)

    with pytest.raises(PeerFailure, match="rank 0"):
        Bootstrap(store).collect("x", range(1), 5, look)


def test_what_is_forgotten_is_not_there(store: HashStore) -> None:
    bootstrap = Bootstrap(store)
    bootstrap.publish("key", 1)
    bootstrap.forget("key")
    assert bootstrap.peek("key") is None
    bootstrap.forget("key")


def test_what_is_no_message_is_a_strangers_and_told(store: HashStore) -> None:
    told: list[WorldError] = []
    bootstrap = Bootstrap(store, tell=told.append)
    store.set("key", bootstrap._sealing.close("key", b"no JSON"))  # type: ignore[arg-type]
    with pytest.raises(Untrusted, match="'key' is not JSON") as raised:
        bootstrap.peek("key")
    assert told == [raised.value]


def test_pauses_grow_up_to_a_hundredth_of_a_second() -> None:
    """So that a rank that comes is soon seen, and a deadline not long overstepped."""
    paused: list[float] = []

    def look(missing: set[int]) -> dict[int, str]:
        return {0: "there"} if len(paused) == 7 else {}

    wait_for(look, [0], 3600.0, lambda missing: None, "late", paused.append)
    assert paused == [0.0005, 0.001, 0.002, 0.004, 0.008, 0.01, 0.01]
