"""Symmetric buffers: one allocation a rank, named alike on all, mapped or registered by the peers.

A same-node peer gets the descriptor that maps the memory; a rank of another node gets a NIC key and
nothing else, so it has no other way to the bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mkernel.backends.contracts.memory import SymmetricMemory
from mkernel.backends.contracts.nic import NicSession
from mkernel.errors import PeerFailure
from mkernel.world.exchange import Exchange
from mkernel.world.identity import Identity


class Source(Protocol):
    """A source of memory: an accelerator backend, or the host's own pages."""

    def allocate(self, nbytes: int) -> SymmetricMemory:
        """Allocate zeroed memory that peers of the node can map."""

    def attach(self, descriptor: dict[str, Any]) -> SymmetricMemory:
        """Map what a same-node peer exported."""


@dataclass(frozen=True)
class SymmetricBuffer:
    """One rank's view of a buffer. ``peers``: same-node ranks' memory, mapped here; ``region``: number
    for NIC puts; ``nbytes`` is the same on every rank."""

    region: int
    nbytes: int
    local: SymmetricMemory
    peers: Mapping[int, SymmetricMemory]

    def close(self) -> None:
        """Unmap the peers' memory and free the own. The NIC must have let go of it before."""
        for memory in (*self.peers.values(), self.local):
            memory.close()


def allocate(
    region: int,
    nbytes: int,
    *,
    identity: Identity,
    source: Source,
    session: NicSession | None,
    exchange: Exchange,
    prepare: Callable[[SymmetricMemory], None] = lambda memory: None,
) -> SymmetricBuffer:
    """Allocate, exchange and connect one buffer. Collective: every rank, in the same order.

    Args:
        prepare: called with the own memory before any peer can reach it.

    Raises:
        Timeout: a rank did not take part. PeerFailure: one is gone. OSError: no memory.
    """
    rank, own = identity.rank, identity.node
    near = [r for r, node in enumerate(identity.node_of) if node == own and r != rank]
    far = [r for r, node in enumerate(identity.node_of) if node != own]
    with contextlib.ExitStack() as undo:
        local = source.allocate(nbytes)
        undo.callback(local.close)
        prepare(local)
        if session is not None:
            key = _register(session, region, local, nbytes)
            exchange.publish(f"region/{region}/nic/{rank}", key)
        exchange.publish(f"region/{region}/node{own}/{rank}", local.export())

        peers: dict[int, SymmetricMemory] = {}
        told = exchange.collect(f"region/{region}/node{own}", near)
        for peer in near:
            try:
                peers[peer] = source.attach(told[peer])
            except (FileNotFoundError, ProcessLookupError) as error:  # before the watchdog saw it
                text = (
                    f"rank {peer} died, or ended its world, before its memory was mapped ({error}); "
                    "look at its own output"
                )
                raise PeerFailure(text, peer) from error
            undo.callback(peers[peer].close)
        if session is not None:
            keys = exchange.collect(f"region/{region}/nic", far)
            for peer in far:
                session.bind(region, peer, keys[peer])
        # A peer may put here as soon as it has the key; it must not before all are bound, so that
        # a failure above leaves nobody writing into freed memory.
        exchange.gather("ready", True)
        undo.pop_all()
    for which in ("nic", f"node{own}"):  # all have read them
        exchange.forget(f"region/{region}/{which}/{rank}")
    return SymmetricBuffer(region, nbytes, local, peers)


def _register(session: NicSession, region: int, memory: SymmetricMemory, nbytes: int) -> str:
    """Register host or device memory with the NIC, and return its key."""
    try:
        dmabuf = memory.dmabuf()
    except OSError:
        dmabuf = -1  # the NIC may have another way to it
    if dmabuf is None:
        return session.register(region, memory.address, nbytes)
    try:
        return session.register_device(region, memory.address, nbytes, dmabuf, flush=memory.flush())
    finally:
        if dmabuf >= 0:
            os.close(dmabuf)
