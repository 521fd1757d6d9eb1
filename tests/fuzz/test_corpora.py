"""The corpora begin where readers go: of every kind of message there is a sound one to mutate."""

from __future__ import annotations

import corpora
from targets import bootstrap


def test_the_corpus_has_a_sound_message_of_every_kind() -> None:
    taken = {kind for data in corpora.read("bootstrap").values() for kind in bootstrap(data)}
    assert taken == {"JSON", "Notice", "Peer", "heartbeats", "Address", "Key"}
