"""The accelerator backend under test, as every check of it gets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any, TypeVar

from mkernel.backends import registry
from mkernel.backends.contracts.accelerator import AcceleratorBackend
from mkernel.conformance.process_timeout import process_timeout
from mkernel.conformance.ranks import FirstFind, give_up_after, meeting_place
from mkernel.errors import BackendUnavailable
from mkernel.harness.outcome import CheckFailed, CheckSkipped
from mkernel.launch import launch
from mkernel.machine import usable_accelerator
from mkernel.plan.capabilities import AcceleratorCapabilities
from mkernel.plan.mixed import JOINT, Side
from mkernel.plan.mixed import capabilities as mixed_capabilities
from mkernel.plan.model import DTYPE_BYTES, DtypeName
from mkernel.plan.shapes import SHAPES
from mkernel.selection import nic_and_verbs
from mkernel.settings import load as load_settings

T = TypeVar("T")

OPS = tuple(SHAPES)
"""Every op, the combines included."""

WORLD_TIMEOUT_S = 20.0
"""The deadline of waits inside worlds, once they are there, if the subject has no other."""

START_TIMEOUT_S = 120.0
"""The deadline of waits while a world is made: the time that a busy machine takes to start
processes says nothing of a backend."""

_MOST_RANKS = 16
"""The largest world that is tried if a backend does not claim how many ranks it runs."""
_MOST_PROCESSES = 32
"""The most ranks that the kit starts on one machine, whatever a backend claims."""

_BUSY_S = 60.0
"""A rank that works on one case for this long beyond its deadlines is ended, so that a backend that
hangs cannot stop the kit."""


def bounded(timeout_s: float, port: int | None, fn: Callable[..., T], *args: Any) -> T:
    """Run ``fn(*args)`` in this rank's world, whose waits get ``timeout_s`` from now on. ``port``
    is that of the store where ranks agree to stop at the first find; None: they do not stop."""
    give_up_after(timeout_s)
    with ExitStack() as during:
        during.enter_context(process_timeout(timeout_s + _BUSY_S))
        if port is not None:
            during.enter_context(FirstFind(port, timeout_s + _BUSY_S))
        return fn(*args)


@dataclass(frozen=True)
class AcceleratorSubject:
    """The backend under test and how thoroughly it is tested.

    Attributes:
        name: name of the backend, as in the registry; or of those of unlike nodes, with commas
            between. quick: fewer shapes, worlds and repeats.
        seed: seed of the random draws; a failure's text names the case, so that it can be repeated.
        first_find: whether the cases behind the first that is wrong are left out, of each world.
        timeout_s: deadline of the waits inside worlds, once they are there. What a failure must be
            told within is half of it.
    """

    name: str
    quick: bool = False
    seed: int = 0
    first_find: bool = False
    timeout_s: float = WORLD_TIMEOUT_S

    def require_usable(self) -> None:
        """Raise UnknownBackend or BackendUnavailable if the backend cannot run here."""
        for kind in self.kinds:
            usable_accelerator(kind)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Return the names of the backends, one or one a kind of nodes."""
        return tuple(self.name.split(","))

    @cached_property
    def backends(self) -> tuple[AcceleratorBackend, ...]:
        """Return the backends in the kit's own process (calls run in rank processes)."""
        return tuple(map(registry.accelerator, self.kinds))

    @cached_property
    def capabilities(self) -> AcceleratorCapabilities:
        """Return what the backend claims, or what worlds of unlike nodes do."""
        first, *others = claims = [backend.capabilities() for backend in self.backends]
        if not others:
            return first
        return mixed_capabilities(
            [Side.of(*each, None) for each in zip(self.kinds, claims, strict=True)]
        )

    # ---- claims ------------------------------------------------------------------------------

    def claimed(self, *ops: str) -> tuple[str, ...]:
        """Select the claimed ops among these, in order. Raises CheckSkipped if none is claimed."""
        found = tuple(op for op in ops or OPS if op in self.capabilities.ops)
        if not found:
            raise CheckSkipped(f"not claimed: {', '.join(ops or OPS)}")
        return found

    def claimed_in(self, world: tuple[int, int], *ops: str) -> tuple[str, ...]:
        """Select the claimed ops that the backend has in a world of (nodes, ranks per node). Raises
        CheckSkipped if there is none."""
        found = tuple(op for op in self.claimed(*ops) if self.capabilities.provides(op, world[0]))
        if not found:
            raise CheckSkipped(f"not claimed on {world[0]} nodes: {', '.join(ops or OPS)}")
        return found

    def dtype(self) -> DtypeName:
        """Return the dtype that most checks use: the first claimed of float16, bfloat16, float32
        and float64. Raises CheckFailed if none is claimed."""
        for name in ("float16", "bfloat16", "float32", "float64"):
            if name in self.capabilities.dtypes:
                return name
        raise CheckFailed("claims no dtype of inputs")

    def out_dtype(self, given: DtypeName) -> DtypeName:
        """Return the output dtype that most checks use with inputs of ``given``: the first claimed
        of float32, float16, bfloat16 and float64. Raises CheckFailed if none is claimed."""
        claimed = [out for dtype, out in self.capabilities.dtype_pairs() if dtype == given]
        for name in ("float32", "float16", "bfloat16", "float64"):
            if name in claimed:
                return name
        raise CheckFailed("claims no dtype of outputs")

    def step(self, *dtypes: DtypeName) -> int:
        """Return the number of elements of which the sizes of aligned rows must be multiples."""
        if not dtypes:
            dtypes = (self.dtype(), self.out_dtype(self.dtype()))
        size = min(DTYPE_BYTES[dtype] for dtype in dtypes)
        alignment = self.capabilities.alignment_bytes
        return alignment // gcd(alignment, size)

    def aligned(self, least: int) -> int:
        """Return the smallest legal size, ``least`` or more, of a row that inputs and outputs share."""
        step = self.step()
        return -(-least // step) * step

    @cached_property
    def between_nodes(self) -> bool:
        """Return whether the backend claims a path between nodes with these settings, and the
        default NIC for it is usable here."""
        if self.capabilities.process_group:
            return True
        settings = load_settings()
        one_node = settings.path == "library" and self.capabilities.library_ops
        if one_node or "nic" not in self.capabilities.transfer_paths:
            return False
        try:
            nic, verbs = nic_and_verbs(settings)
        except BackendUnavailable:
            return False
        return registry.nic(nic).status(verbs).usable

    @cached_property
    def room(self) -> int | None:
        """Return the number of ranks that this machine's devices take, one each or as the setting
        ``ranks_per_device`` says. None: any number, because devices are emulated (simulators, the
        CPU)."""
        counts = [sum(not one.emulated for one in backend.probe()) for backend in self.backends]
        least = min(filter(None, counts), default=0)
        return len(counts) * least * load_settings().ranks_per_device or None

    def worlds(self, *wanted: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """Select the worlds (nodes, ranks per node) that can be tested here; the largest if all of
        them have more ranks than the machine has devices. Raises CheckSkipped if there is none."""
        found = tuple(world for world in wanted if world[0] == 1 or self.between_nodes)
        if not found:
            raise CheckSkipped("no path between nodes is claimed and usable here")
        return tuple(world for world in found if self._fits(world)) or (self.largest(),)

    def largest(self) -> tuple[int, int]:
        """Choose the world that most checks use: two nodes of two ranks if there is a path between
        nodes, else three ranks; the first of these, or two ranks, for which the machine has
        devices. Raises CheckSkipped if it has one device."""
        wanted = ((2, 2), (1, 3), (1, 2)) if self.between_nodes else ((1, 3), (1, 2))
        for world in wanted:
            if self._fits(world):
                return world
        raise CheckSkipped(f"needs 2 devices of accelerator {self.name!r}; this machine has 1")

    def crowd(self) -> tuple[int, int]:
        """Choose one node of as many ranks as the backend claims to run, or of 16. Raises
        CheckSkipped if this machine has no devices for more ranks than other checks use."""
        claimed = min(self.capabilities.most_ranks or _MOST_RANKS, _MOST_PROCESSES)
        ranks = claimed if self.room is None else min(claimed, self.room)
        if ranks <= self.largest()[0] * self.largest()[1]:
            raise CheckSkipped(
                f"a world of {claimed} ranks would be tried, and other checks have worlds of {ranks}, "
                "the most that the backend claims or this machine has devices for"
            )
        return 1, ranks

    def _fits(self, world: tuple[int, int]) -> bool:
        ranks = world[0] * world[1]
        few = self.room is None or ranks <= self.room
        return few and ranks % len(self.kinds) == 0 and self.capabilities.too_many(ranks) is None

    def usual_worlds(self) -> tuple[tuple[int, int], ...]:
        """Choose two ranks of one node, and the largest world; if quick, the latter alone, which
        has both kinds of paths if there are two. If devices are too few for that, add two nodes of
        one rank, provided that there is a path between nodes."""
        found = [self.largest()] if self.quick else [(1, 2), self.largest()]
        if self.between_nodes and self.largest()[0] == 1:
            found.append((2, 1))
        return tuple(dict.fromkeys(found))

    def split(self, world: tuple[int, int]) -> dict[str, Any]:
        """Return how to launch a world (nodes, ranks per node), in which each of several kinds of
        accelerators has as many nodes; if it has too few nodes, its ranks form one of each kind."""
        nodes, each = world
        if nodes % len(self.kinds):
            nodes, each = len(self.kinds), nodes * each // len(self.kinds)
        return {"nodes": nodes, "ranks_per_node": each, "accelerator": JOINT.join(self.kinds)}

    # ---- running -----------------------------------------------------------------------------

    def launch(
        self,
        fn: Callable[..., T],
        *args: Any,
        world: tuple[int, int],
        timeout_s: float | None = None,
        on_report: Callable[[int, Any], None] = lambda rank, payload: None,
    ) -> list[T]:
        """Run ``fn(*args)`` on every rank of a world of the backend, and return the ranks' results.
        ``timeout_s`` replaces the subject's limit of each wait in the world, once it is there."""
        with meeting_place() if self.first_find else nullcontext() as port:
            return launch(
                bounded,
                self.timeout_s if timeout_s is None else timeout_s,
                port,
                fn,
                *args,
                **self.split(world),
                timeout_s=START_TIMEOUT_S,
                on_report=on_report,
            )

    def judge(self, fn: Callable[..., Sequence[str]], *args: Any, world: tuple[int, int]) -> None:
        """Run a function that returns what it found wrong. Raises CheckFailed if it found
        anything."""
        blame([found for each in self.launch(fn, *args, world=world) for found in each])


def blame(found: Sequence[str]) -> None:
    """Raise CheckFailed if anything was found wrong, with the first finds and how many more."""
    if found:
        more = f"\n… and {len(found) - 3} more" if len(found) > 3 else ""
        raise CheckFailed("\n".join(found[:3]) + more)
