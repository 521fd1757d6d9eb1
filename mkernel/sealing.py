"""Authenticated encryption of what ranks write to the bootstrap store.

A sealed message is an HMAC-SHA256 of its name and contents, followed by the contents, encrypted by
a SHAKE-256 key stream which that HMAC seeds (the SIV construction). Whoever lacks the secret can
neither read a message, nor change it, nor pass it off under another name. Sealing is deterministic,
so that compare-and-set works on sealed messages. An empty secret is one that everybody knows.
"""

from __future__ import annotations

import hashlib
import hmac

from mkernel.errors import Untrusted

SIGNATURE_BYTES = hashlib.sha256().digest_size
_MAX_BYTES = 1 << 24
"""Of one message; topologies of big nodes are the longest ones."""


class Seal:
    """Seals and opens messages with a secret."""

    def __init__(self, secret: bytes) -> None:
        self._signing_key = hmac.digest(secret, b"signature", "sha256")
        self._cipher_key = hmac.digest(secret, b"cipher", "sha256")

    def close(self, name: str, body: bytes) -> bytes:
        """The message ``body``, for the name ``name`` only."""
        signature = self._sign(name, body)
        return signature + self._cipher(signature, body)

    def open(self, name: str, sealed: bytes) -> bytes:
        """What ``close`` was given. Untrusted: this is not a message of that name, sealed with this
        secret."""
        if len(sealed) > _MAX_BYTES:
            raise Untrusted(
                f"bootstrap message {name!r} has {len(sealed)} bytes; a rank writes at most "
                f"{_MAX_BYTES}"
            )
        signature, hidden = sealed[:SIGNATURE_BYTES], sealed[SIGNATURE_BYTES:]
        body = self._cipher(signature, hidden)
        if not hmac.compare_digest(self._sign(name, body), signature):
            raise Untrusted(
                f"bootstrap message {name!r} is not signed by a rank of this world; give every rank "
                "the same MKERNEL_JOB_SECRET, and keep strangers from the store's port"
            )
        return body

    def _sign(self, name: str, body: bytes) -> bytes:
        return hmac.digest(self._signing_key, name.encode() + b"\0" + body, "sha256")

    def _cipher(self, signature: bytes, text: bytes) -> bytes:
        """Encrypts and decrypts."""
        stream = hashlib.shake_256(self._cipher_key + signature).digest(len(text))
        mixed = int.from_bytes(text, "big") ^ int.from_bytes(stream, "big")
        return mixed.to_bytes(len(text), "big")
