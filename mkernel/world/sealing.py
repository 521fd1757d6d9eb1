"""Authenticated encryption of what ranks write to the bootstrap store.

Messages are sealed with AES-SIV (RFC 5297): whoever lacks the secret can neither read a message, nor
change it, nor pass it off under another name. Sealing is deterministic, so that compare-and-set works
on sealed messages. An empty secret is one that everybody knows.
"""

from __future__ import annotations

import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from mkernel.errors import Untrusted

_MAX_BYTES = 1 << 24
"""The longest message that is opened; topologies of big nodes are the longest ones that ranks write."""


class Seal:
    """Seals and opens messages with a secret of any length."""

    def __init__(self, secret: bytes) -> None:
        self._siv = AESSIV(hmac.digest(secret, b"mkernel seal", "sha512"))  # 64 bytes: AES-256

    def close(self, name: str, body: bytes) -> bytes:
        """Seal ``body``, which is not empty, as a message of the name ``name`` only."""
        return self._siv.encrypt(body, [name.encode()])

    def open(self, name: str, sealed: bytes) -> bytes:
        """Open a message, and return the body that ``close`` was given. Untrusted: this is not a
        message of that name, sealed with this secret."""
        if len(sealed) > _MAX_BYTES:
            raise Untrusted(
                f"bootstrap message {name!r} has {len(sealed)} bytes; a rank writes at most "
                f"{_MAX_BYTES}"
            )
        try:
            return self._siv.decrypt(sealed, [name.encode()])
        except (InvalidTag, ValueError):  # the latter: too short to be one
            raise Untrusted(
                f"bootstrap message {name!r} is not signed by a rank of this world; give every rank "
                "the same MKERNEL_JOB_SECRET, and keep strangers from the store's port"
            ) from None
