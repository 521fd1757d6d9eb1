"""One accelerator backend of a world, and what its calls use there: its map of the world, its memory,
the process group that carries its bytes.

A world has an engine for the backend that it was made with, and one for each companion, which runs the
ops that those before it do not have. The first is opened when the world is joined; a companion with the
first call that it runs, so that a world that makes none pays nothing for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributed import ProcessGroup

from mkernel.backends import registry
from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.errors import Unsupported
from mkernel.plan import missing
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.selection import nic_use
from mkernel.settings import Settings
from mkernel.topology.model import Topology
from mkernel.topology.world_map import WorldMap, world_map
from mkernel.world.exchange import Exchange
from mkernel.world.failure import FailureMonitor
from mkernel.world.identity import Backends, Identity
from mkernel.world.memory import SymmetricHeap
from mkernel.world.process_group import GroupStore, open_group

DRAIN_S = 5.0
"""Seconds for which a rank that stops waits for what still runs on its device."""


class Engine:
    """A backend of one world on one rank.

    Attributes:
        backends: of its plans: its own name, and the NIC that it puts through.
        accelerator: an instance of this world's own, so that worlds of a process do not share one.
        map: where ranks and bytes go for its plans; the same on every rank.
        heap, group: once it is open.
    """

    heap: SymmetricHeap
    group: ProcessGroup | None = None

    def __init__(
        self,
        backends: Backends,
        topology: Topology,
        identity: Identity,
        settings: Settings,
        accelerator: AcceleratorBackend | None = None,
    ) -> None:
        """Make the engine; ``accelerator``: a new instance; None: of the registry's backend."""
        self.backends = backends
        self._topology = topology
        self._me = identity
        self._settings = settings
        self.accelerator = accelerator or registry.new_accelerator(backends.accelerator)
        claims = self.claims
        self.map: WorldMap = world_map(
            topology,
            identity.ranks_per_node,
            claims.constants_by(settings.constants, self.accelerator.cards_of(topology)),
            group=claims.process_group,
            pinning=settings.pinning,
            nics=nic_use(backends.nic, settings),
        )
        self._opened = False

    @property
    def claims(self) -> AcceleratorCapabilities:
        """Return the capabilities that the backend claims."""
        return self.accelerator.capabilities()

    def open(self, exchange: Exchange, failure: FailureMonitor, regions: Iterator[int]) -> None:
        """Choose the rank's device, and make the signal pad. Collective.

        Args:
            failure: is told of each part as it opens, so that a failure meanwhile ends its waits.
            regions: numbers of the world's symmetric buffers.

        Raises:
            Unsupported: the backend cannot run in such a world.
        """
        lacks = missing.of_world(
            self.backends.accelerator, self.claims, self.map.kinds, self._me.ranks_per_node
        )
        if lacks:
            raise Unsupported("; ".join(lacks))
        here = self.map.placement[self._me.rank].accelerator
        node = self._topology.nodes[self._me.node]
        self.accelerator.open(next(one for one in node.accelerators if one.id == here))
        self._opened = True
        failure.accelerators.append(self.accelerator)
        self.heap = SymmetricHeap(self._me, self.accelerator, exchange, failure, regions)
        failure.guard(self.heap.pad)

    def join_group(
        self,
        store: GroupStore,
        *,
        prefix: str,
        name: str,
        one_host: bool,
        undo: contextlib.ExitStack,
    ) -> None:
        """Make the process group, where the backend asks for one. Collective.

        Args:
            prefix: of its keys in the store.
        """
        if self.claims.process_group:
            self.group = open_group(
                self.accelerator,
                self._me.rank,
                self._me.size,
                store,
                self._settings.timeout_s,
                prefix=prefix,
                name=name,
                one_host=one_host,
                undo=undo,
            )

    def close(self) -> bool:
        """Wait for what runs on the device. Return False where it still does, and may touch memory."""
        return not self._opened or self.accelerator.close(DRAIN_S)

    def free(self, *, quiet: bool) -> None:
        """Free its memory, as :meth:`SymmetricHeap.close` does, and hold the process group no more."""
        self.group = None
        if hasattr(self, "heap"):
            self.heap.close(quiet=quiet)
