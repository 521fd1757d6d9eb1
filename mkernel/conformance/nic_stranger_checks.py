"""Checks that a process outside a job reaches none of its ranks.

A stranger is a process with the same backend, and with texts of another job in which some of this
job's stand: it knows where a rank is, and the keys of its memory, and lacks the key of its session.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from mkernel.backends.contracts.nic import NicSession
from mkernel.conformance.check import Check
from mkernel.harness.nic_ranks import NicSubject, Pattern, Port, Rank, require_equal
from mkernel.harness.outcome import CheckFailed

_BYTES = 4096
_SHORTEST_KEY = 16
"""The least number of characters of a text that may hold both a place and a key."""
_PATIENCE_S = 0.3
"""The limit of each step of a stranger, whose session may await peers that never come."""


def _forged(told: str, others: str) -> Iterator[str]:
    """Yield texts between a session's and another's: of all that differs, one thing is the
    session's own."""
    try:
        mine, theirs = json.loads(told), json.loads(others)
    except ValueError:
        yield from _spliced(told, others)
        return
    paths = [path for path in _leaves(mine) if _at(mine, path) != _at(theirs, path)]
    for path in paths:
        own = _at(mine, path)
        if len(paths) > 1:
            yield json.dumps(_with(theirs, path, own))
        for text in _spliced(own, _at(theirs, path)):
            yield json.dumps(_with(theirs, path, text))


def _spliced(mine: Any, theirs: Any) -> Iterator[str]:
    """Join the first half of one text to the second half of another, if they may hold a key."""
    if isinstance(mine, str) and isinstance(theirs, str) and len(mine) >= _SHORTEST_KEY:
        yield mine[: len(mine) // 2] + theirs[len(mine) // 2 :]


def _leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(tree, dict | list):
        for key, inside in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(inside, (*path, key))
    else:
        yield path


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _with(tree: Any, path: tuple[Any, ...], leaf: Any) -> Any:
    """Return the same tree with another leaf."""
    if not path:
        return leaf
    copied = dict(tree) if isinstance(tree, dict) else list(tree)
    copied[path[0]] = _with(tree[path[0]], path[1:], leaf)
    return copied


def _attempt(step: Callable[..., Any], *given: Any) -> None:
    """Make a step of a stranger, which may be refused; a step that does not end in time is left
    running."""

    def run() -> None:
        with suppress(Exception):
            step(*given)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)


def _stranger(me: Rank) -> None:
    """Act as rank 2, a stranger that takes rank 0's place wherever rank 1 can be reached with less
    than its own text."""
    told = me.exchange()[1]
    with_other = me.subject.session(1)
    ports: list[Port] = []
    for address in _forged(told, with_other.address(0)):
        session: NicSession = me.subject.session(0)
        ports.append(Port(0, session, _BYTES, me.subject.timeout_s))
        session.address(1)
        _attempt(session.connect, 1, address)
    me.exchange()
    me.exchange()
    key = me.exchange()[1]
    for port in ports:
        port.memory.bytes[:] = 0xBB
        session = port.session
        _attempt(session.start, port.pad, ())
        _attempt(session.register, 0, port.memory.address, _BYTES)
        _attempt(session.bind, 0, 1, key)
        _attempt(session.put, 1, 0, 0, _BYTES // 2, 64, 5, 1)
        _attempt(session.flush, _PATIENCE_S)
    me.exchange()
    me.exchange()
    for session in (with_other, *(port.session for port in ports)):
        _attempt(session.close)


def _member(me: Rank) -> None:
    """Act as rank 0 or 1 of a job that goes on as if there were no stranger."""
    peer = 1 - me.rank
    session = me.subject.session(me.rank)
    port = Port(me.rank, session, _BYTES, me.subject.timeout_s)
    pattern = Pattern(me.subject.seed, _BYTES)
    try:
        told = me.exchange(session.address(peer))
        me.exchange()  # the stranger comes first
        session.connect(peer, told[peer])
        session.start(port.pad, ())
        me.exchange()
        keys = me.exchange(session.register(0, port.memory.address, _BYTES))
        session.bind(0, peer, keys[peer])
        me.exchange()  # the stranger has done what he can
        port.memory.bytes[: _BYTES // 4] = pattern.window(0, _BYTES // 4)
        session.put(peer, 0, 0, _BYTES // 4, _BYTES // 4, 0, 1)
        port.exactly(0, 1, "a put of the job, of which a stranger wanted to be")
        port.flush()
        expected = np.zeros(_BYTES, dtype=np.uint8)
        expected[: _BYTES // 4] = expected[_BYTES // 4 : _BYTES // 2] = pattern.window(
            0, _BYTES // 4
        )
        require_equal(port.memory.bytes, expected, "memory that only the job's ranks may write")
        if port.count(5):
            raise CheckFailed("a stranger raised a signal")
        me.exchange()
    finally:
        session.close()


def _visited(me: Rank) -> None:
    (_member if me.rank < 2 else _stranger)(me)


def strangers(subject: NicSubject) -> None:
    """Let a process connect to one of two ranks of a job before the other rank does."""
    subject.run(_visited, 3)


STRANGER_CHECKS: tuple[Check, ...] = (
    Check("strangers", "a session takes peers of its own job, and loses none to others", strangers),
)
