"""The turns of the campaign, each drawn from a seed and the turn's number alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from campaigns.faults import DEVICE_FAULTS, KINDS, Fault, WorldKind

from mkernel.cases import Case
from mkernel.conformance import grid
from mkernel.conformance.accelerator import AcceleratorSubject
from mkernel.conformance.ranks import describe

WORLDS = ((1, 1), (1, 2), (1, 2), (1, 3), (1, 4), (2, 1), (2, 1), (2, 2), (2, 2), (3, 1), (3, 2))
"""(nodes, ranks per node); a shape that is there twice is drawn twice as often."""
TIMEOUT_S, SHORT_TIMEOUT_S = 30.0, 4.0
"""Deadlines of a world's waits; the short one where a deadline alone can tell of a fault, once the
world has been joined."""


@dataclass(frozen=True)
class Turn:
    """One world and what happens to it.

    Attributes:
        environment: the settings of its ranks. nic: of a world whose puts go through one, else empty.
        cases: what is called, one after another, over and over. calls: how many of them, where nothing
            is to end the world before.
        apart: whether its nodes are hosts that cannot see each other's processes.
        group: ranks that make a world of their own beside it, as many of each of ``group_nodes``
            nodes, by node; empty: none.
        group_cases: what these call there, one after each call of all.
    """

    seed: int
    number: int
    world: WorldKind
    nic: str
    timeout_s: float
    environment: Mapping[str, str]
    cases: tuple[Case, ...]
    calls: int
    fault: Fault
    apart: bool = False
    group: tuple[int, ...] = ()
    group_cases: tuple[Case, ...] = ()
    group_nodes: int = 1

    def __str__(self) -> str:
        world, nic = self.world, f" on {self.nic}" if self.nic else ""
        group = f" and ranks {', '.join(map(str, self.group))}" if self.group else ""
        return (
            f"turn {self.number} of seed {self.seed}: {world.nodes}x{world.ranks_per_node} "
            f"{world.accelerator}{nic}{group}, {self.fault}"
        )

    def in_full(self) -> str:
        """Describe the turn with its calls and settings."""
        settings = " ".join(f"{name}={value}" for name, value in self.environment.items())
        calls = "; ".join(describe(case) for case in self.cases)
        beside = "".join(f"\n  in the group: {describe(case)}" for case in self.group_cases)
        return (
            f"{self}\n  {self.calls} calls, deadline {self.timeout_s:g} s: {calls}{beside}\n"
            f"  {settings}"
        )


@cache
def _subject(accelerator: str) -> AcceleratorSubject:
    return AcceleratorSubject(accelerator)


def draw(seed: int, number: int, kind: str | None = None) -> Turn:
    """Draw a turn. ``kind``: of its fault; None: that is drawn too."""
    chance = random.Random(f"{seed}/{number}")
    names = list(KINDS)
    kind = kind or chance.choices(names, [KINDS[name].weight for name in names])[0]
    of = KINDS[kind]
    worlds = [
        world
        for accelerator in ("streams", "ascend")
        for shape in WORLDS
        if of.happens_to(world := WorldKind(*shape, accelerator))
    ]
    world = chance.choice(worlds)
    nic = chance.choice(("cx7", "efa")) if world.through_a_nic else ""
    fault = _fault(kind, world, chance)
    apart = kind.startswith("host-") or (_hosts_apart(world) and chance.random() < 0.3)
    return Turn(
        seed,
        number,
        world,
        nic,
        SHORT_TIMEOUT_S if of.short_deadline else TIMEOUT_S,
        _settings(world, nic, kind, apart, chance),
        _cases(world, chance),
        chance.randint(1, 6),
        fault,
        apart,
        *_group(world, fault, random.Random(f"group {seed}/{number}")),
    )


def _group(
    world: WorldKind, fault: Fault, chance: random.Random
) -> tuple[tuple[int, ...], tuple[Case, ...], int]:
    each = world.ranks_per_node
    # A world that is still being joined has nobody to make another one of.
    if world.size < 2 or fault.stage == "join" or chance.random() < 0.6:
        return (), (), 1
    several = world.nodes > 1 and (each < 2 or chance.random() < 0.5)
    nodes = sorted(
        chance.sample(range(world.nodes), chance.randint(2, world.nodes) if several else 1)
    )
    of_each = chance.randint(1 if several else 2, each)
    chosen = [
        node * each + local
        for node in nodes
        for local in sorted(chance.sample(range(each), of_each))
    ]
    kind = WorldKind(len(nodes), of_each, world.accelerator)
    return tuple(chosen), _cases(kind, chance), len(nodes)


def after(turn: Turn) -> Turn:
    """Return the world that the same processes make next, in which nothing happens."""
    plain = draw(turn.seed, turn.number + 1_000_000, "none")
    world = turn.world
    nic = turn.nic
    cases = _cases(world, random.Random(f"after {turn.seed}/{turn.number}"))
    settings = {n: v for n, v in turn.environment.items() if n != "MKERNEL_SOFTVERBS_FAULTS"}
    return Turn(
        turn.seed, turn.number, world, nic, TIMEOUT_S, settings, cases[:2], min(3, plain.calls),
        Fault("none"), turn.apart,
    )  # fmt: skip


def _hosts_apart(world: WorldKind) -> bool:
    return world.accelerator == "streams" and world.nodes > 1


def _fault(kind: str, world: WorldKind, chance: random.Random) -> Fault:
    victim = chance.randrange(world.size)
    victims: tuple[int, ...] = (victim,)
    if kind == "none":
        victims = ()
    elif kind.startswith("host-"):
        first = victim - victim % world.ranks_per_node
        victims = tuple(range(first, first + world.ranks_per_node))
    device = ""
    if kind in DEVICE_FAULTS:
        device = chance.choice(DEVICE_FAULTS[kind]).format(
            count=chance.randint(1, 60), ms=chance.randint(50, 600)
        )
    return Fault(
        kind,
        victims,
        chance.choice(KINDS[kind].stages),
        chance.choice((0.0, chance.uniform(0.0, 0.02), chance.uniform(0.0, 0.5))),
        chance.randint(0, 4),
        chance.random(),
        device,
    )


def _settings(
    world: WorldKind, nic: str, kind: str, apart: bool, chance: random.Random
) -> dict[str, str]:
    # Hosts know each other by heartbeats alone, and a busy machine may keep one waiting.
    drawn = {"MKERNEL_HEARTBEAT_S": str(0.2 if apart else chance.choice((0.05, 0.1, 0.2)))}
    if world.nodes > 1:
        drawn["MKERNEL_EXCHANGE"] = chance.choice(("auto", "direct"))
    drawn["MKERNEL_PATH"] = chance.choice(("auto", "fused"))
    if not nic:
        return drawn
    device = {
        "SEED": chance.randrange(1 << 20),
        "LATENCY_NS": chance.choice((0, 0, 20_000)),
        "JITTER_NS": chance.choice((0, 50_000)),
        "MAX_MESSAGE": chance.choice((4096, 1 << 30)),
        "BY_REFERENCE": chance.choice((0, 1)),
        "RELAXED_ORDERING": chance.choice((0, 1)),
        "REORDER": chance.choice((0, 1, 1)),
        "HOLD_NS": chance.choice((1, 40_000, 400_000)),
        "DUPLICATES": chance.choice((0, 10, 50, 100)),
    }
    nics = {
        "QPS": chance.choice((1, 1, 2, 4)),
        "STRIPE_BYTES": chance.choice((1, 4096, 1 << 18)),
        "QUEUE_DEPTH": chance.choice((4, 16, 128)),
        "RECEIVE_DEPTH": chance.choice((16, 256, 4096)),
        "FIFO_SLOTS": chance.choice((2, 16, 1024)),
    }
    if (
        KINDS[kind].by == "device" and kind != "link-back-in-time"
    ):  # found in 0.2 s with all retries
        nics["QP_TIMEOUT"] = 13
        device["SRD_TIMEOUT_MS"] = 200
    else:
        nics["QP_TIMEOUT"] = 16
        device["SRD_TIMEOUT_MS"] = 5000
    drawn |= {f"MKERNEL_SOFTVERBS_{name}": str(value) for name, value in device.items()}
    drawn |= {f"MKERNEL_NIC_SETTINGS__{name}": str(value) for name, value in nics.items()}
    return drawn


def _cases(world: WorldKind, chance: random.Random) -> tuple[Case, ...]:
    shape = world.nodes, world.ranks_per_node
    return tuple(draw_cases(_subject(world.accelerator), shape, chance, chance.randint(1, 3)))


def draw_cases(
    subject: AcceleratorSubject, world: tuple[int, int], chance: random.Random, count: int
) -> list[Case]:
    """Draw calls of a world of (nodes, ranks per node), each with a seed of its own."""
    ops = subject.claimed_in(world)
    found: list[Case] = []
    for _ in range(count):
        seeded = AcceleratorSubject(subject.name, seed=chance.randrange(1 << 30))
        found += grid.draws(seeded, chance.choice(ops), world[0] * world[1], 1)
    return found
