"""Sealed messages: only who has the secret reads or writes them, each under its own name."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from mkernel.errors import Untrusted
from mkernel.world import sealing
from mkernel.world.sealing import Seal

OVERHEAD_BYTES = 16
BODY = b"an address of a queue pair" * 40


@pytest.mark.parametrize("body", [b"x", BODY, bytes(range(256)) * 5000])
def test_what_is_sealed_opens(body: bytes) -> None:
    sealed = Seal(b"secret").close("key", body)
    assert Seal(b"secret").open("key", sealed) == body
    assert len(sealed) == len(body) + OVERHEAD_BYTES
    assert Seal(b"secret").close("key", body) == sealed  # else compare-and-set does not work


def test_a_sealed_message_shows_nothing_but_its_size() -> None:
    sealed = Seal(b"secret").close("key", BODY)
    assert not {BODY[at : at + 4] for at in range(26)} & {
        sealed[at : at + 4] for at in range(len(sealed))
    }
    other = Seal(b"secret").close("key", BODY[:-1] + b"X")
    same = sum(one == two for one, two in zip(sealed, other, strict=True))
    assert same < len(sealed) / 16  # 1 in 256 by chance: the key stream is the message's own


@pytest.mark.parametrize(("secret", "name"), [(b"other", "key"), (b"", "key"), (b"secret", "ke")])
def test_another_secret_or_name_does_not_open_it(secret: bytes, name: str) -> None:
    with pytest.raises(Untrusted, match=name):
        Seal(secret).open(name, Seal(b"secret").close("key", BODY))


def test_every_byte_counts() -> None:
    sealed = Seal(b"secret").close("key", b"body")
    for at in range(len(sealed)):
        changed = bytearray(sealed)
        changed[at] ^= 1
        with pytest.raises(Untrusted):
            Seal(b"secret").open("key", bytes(changed))
    for short in (b"", sealed[:3], sealed[:OVERHEAD_BYTES], sealed[:-1]):
        with pytest.raises(Untrusted):
            Seal(b"secret").open("key", short)


def test_the_longest_message_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = Seal(b"secret")
    sealed = seal.close("key", b"body")
    for most in (len(sealed), len(sealed) - 1):
        monkeypatch.setattr(sealing, "_MAX_BYTES", most)
        with nullcontext() if most == len(sealed) else pytest.raises(Untrusted, match="at most"):
            assert seal.open("key", sealed) == b"body"
