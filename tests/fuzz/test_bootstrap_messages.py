"""Mutated bootstrap messages: each is taken for what it is or refused by name, never anything else.

Seeded, so that a failure repeats; the messages of ``corpora/bootstrap.json`` come first.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import corpora
import pytest
from targets import bootstrap
from torch.distributed import HashStore

from mkernel.errors import Untrusted
from mkernel.world.bootstrap import Bootstrap

MESSAGES = [
    data.decode().strip()
    for name, data in corpora.read("bootstrap").items()
    if name.endswith(".json")
]
EDGES: list[Any] = [
    *(None, True, "", "left", [], {}, [[]], 0, -1, 1.5, 1e308, 1 << 24, 1 << 32, 1 << 64, 1 << 200),
    *("0" * 5000, "\ud800", "\0", float("nan"), float("inf"), {"": {}}),
]
PIECES = [
    b"{",
    b"}",
    b"[",
    b'"',
    b"\\u",
    b"\\",
    b"null",
    b"NaN",
    b"-",
    b"1e999",
    b"\xff",
    b"\0",
    b",",
]


def mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, cut, doubled or put in."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << chance.randrange(8)
            case 1:
                del out[at : at + chance.randint(1, 8)]
            case 2:
                out[at:at] = chance.choice(PIECES)
            case 3:
                out[at:at] = out[at : at + 64]
            case _:
                out[at:at] = bytes([chance.choice(b"[{")]) * chance.choice([1, 2000, 200_000])
    return bytes(out)


def mutated_value(value: Any, chance: random.Random) -> Any:
    """One member, at any depth, replaced, left out or added."""
    if not isinstance(value, dict) or not value or chance.random() < 0.05:
        return chance.choice(EDGES)
    name = chance.choice(list(value))
    out = dict(value)
    match chance.randrange(4):
        case 0:
            del out[name]
        case 1:
            out[chance.choice(["extra", "kind", "rank", "peer"])] = chance.choice(EDGES)
        case _:
            out[name] = mutated_value(value[name], chance)
    return out


def values(count: int, seed: int) -> list[Any]:
    """The corpus, then its mutations; everything as it comes out of JSON."""
    chance = random.Random(seed)
    known = [json.loads(line) for line in MESSAGES]
    made = [mutated_value(chance.choice(known), chance) for _ in range(count)]
    return known + [json.loads(json.dumps(value)) for value in made]


@pytest.mark.parametrize("secret", [b"", b"secret"])
def test_changed_bytes_are_refused(secret: bytes) -> None:
    chance = random.Random(1)
    store = HashStore()
    bootstrap = Bootstrap(store, secret)
    for turn in range(4000):
        bootstrap.publish("key", json.loads(MESSAGES[turn % len(MESSAGES)]))
        sealed = bytes(store.get("key"))
        changed = mutated_bytes(sealed, chance)
        store.set("key", changed)
        if changed == sealed:
            continue
        with pytest.raises(Untrusted):
            bootstrap.peek("key")


def test_a_message_without_end_is_refused() -> None:
    store = HashStore()
    bootstrap = Bootstrap(store, b"secret")
    bootstrap.publish("key", "x" * (1 << 24))
    with pytest.raises(Untrusted, match="at most"):
        bootstrap.peek("key")


def test_any_body_that_is_signed_is_a_message_or_refused() -> None:
    """Without a secret a stranger can sign too."""
    chance = random.Random(2)
    bodies = [json.dumps(value).encode() for value in values(20_000, 3)]
    for turn in range(4000):
        changed = mutated_bytes(MESSAGES[turn % len(MESSAGES)].encode(), chance)
        bodies += [changed, json.dumps(changed.decode("latin-1")).encode()]
    taken = Counter(kind for body in bodies for kind in bootstrap(body))
    assert taken.keys() == {"JSON", "Notice", "Peer", "heartbeat", "Address", "Key"}
    assert all(4 < count < len(bodies) for count in taken.values()), taken
