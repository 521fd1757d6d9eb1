"""A soak of the NIC backends on the software device: random traffic and random faults.

Three processes live through the whole time. In turns they join in a world, put random bytes and
signals to one another, and leave it; in half of the turns one of their devices has a fault. Bars:
where the fault heals, or there is none, every signal comes to its exact value and every byte is there;
where it does not, every rank but one whose own device is silent has its NicError in time, no signal
exceeds what was put, and the next turn works; from a tenth of the time on, no process's own memory
grows by more than 8 MiB, and none keeps a file descriptor, thread or mapping.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from campaigns.held import own_bytes

from mkernel.backends.contracts.nic import PUT_VALUE_MAX
from mkernel.conformance.nic_life_checks import (
    close_in_time,
    left_behind,
    require,
    require_nothing_more,
)
from mkernel.errors import NicError
from mkernel.harness.nic_ranks import NicSubject, Pattern, Port, Rank, deadline, require_equal
from mkernel.harness.outcome import CheckFailed

RANKS = 3
AREA = 128 << 10  # of a rank's memory: its pattern first, then where each rank puts to
SIGNALS = 32  # that a rank raises at each other
GROWTH_MIB = 8.0
NOTICED_S = 10.0
FAULTS = "MKERNEL_SOFTVERBS_FAULTS"
HEALING = ("cut@{puts}+40ms", "cut@{ms}ms+40ms", "stall@{puts}+40ms", "stall@{ms}ms+40ms")
BREAKING = ("drop@{puts}", "cut@{puts}", "cut@{ms}ms", "qp-error@{puts}", "cq-overflow@{puts}")
SILENT = ("stall@{puts}",)
"""The rank whose device stalls for good hears nothing of it; the others do."""


class Turn(NamedTuple):
    """The next thing that all ranks do; each draws the same. ``fault``: of the device of rank
    ``faulty``."""

    number: int
    fault: str
    faulty: int
    breaks: bool
    silent: bool
    puts: int
    environment: dict[str, str]

    @classmethod
    def draw(cls, seed: int, number: int) -> Turn:
        """Draw a turn from its seed and number alone."""
        chance = random.Random(f"{seed}/{number}")
        breaks = chance.random() < 0.25
        heals = not breaks and chance.random() < 1 / 3
        fault = chance.choice((*BREAKING, *SILENT)) if breaks else chance.choice(HEALING)
        environment = {
            "MKERNEL_SOFTVERBS_SEED": str(number),
            "MKERNEL_SOFTVERBS_MAX_MESSAGE": str(chance.choice((4096, 1 << 30))),
            "MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS": "100" if breaks else "5000",
        }
        return cls(
            number,
            fault.format(puts=chance.randint(1, 200), ms=chance.randint(1, 60))
            if breaks or heals
            else "",
            chance.randrange(RANKS),
            breaks,
            breaks and fault in SILENT,
            chance.randint(50, 400) if chance.random() < 0.8 else chance.randint(1000, 4000),
            environment,
        )


class Put(NamedTuple):
    """A put to ``peer``: the pattern's bytes from ``at`` on, to the same place of the sender's area."""

    peer: int
    at: int
    nbytes: int
    signal: int
    value: int


def puts_of(seed: int, turn: Turn, source: int) -> list[Put]:
    """Draw what a rank puts in a turn."""
    chance = random.Random(f"{seed}/{turn.number}/{source}")
    peers = [rank for rank in range(RANKS) if rank != source]
    drawn = []
    largest = 32 << 10 if turn.puts <= 400 else 64  # so that few puts cover each other
    for _ in range(turn.puts):
        nbytes = chance.choice((0, chance.randint(1, 64), chance.randint(1, largest)))
        at = chance.randint(0, AREA - nbytes)
        signal = source * SIGNALS + chance.randrange(SIGNALS)
        drawn.append(
            Put(chance.choice(peers), at, nbytes, signal, chance.randint(1, PUT_VALUE_MAX))
        )
    return drawn


def put(port: Port, each: Put) -> None:
    """Queue a put. NicError: the session has failed."""
    there = (1 + port.rank) * AREA + each.at
    port.session.put(each.peer, 0, each.at, there, each.nbytes, each.signal, each.value)


def whole(me: Rank, port: Port, seed: int, turn: Turn, pattern: Pattern) -> None:
    """Play a turn in which nothing may be lost."""
    for each in puts_of(seed, turn, me.rank):
        put(port, each)
    expected = np.zeros((1 + RANKS) * AREA, dtype=np.uint8)
    expected[:AREA] = pattern.bytes
    sums: Counter[int] = Counter()
    for source in me.peers:
        for each in puts_of(seed, turn, source):
            if each.peer != me.rank:
                continue
            sums[each.signal] += each.value
            at = (1 + source) * AREA + each.at
            expected[at : at + each.nbytes] = pattern.window(each.at, each.nbytes)
    what = f"turn {turn.number} ({turn.fault or 'no fault'} at rank {turn.faulty}): rank {me.rank}"
    for signal, value in sums.items():
        port.exactly(signal, value, what)
    require_equal(port.memory.bytes, expected, what)
    port.flush()


def broken(me: Rank, port: Port, seed: int, turn: Turn) -> None:
    """Play a turn whose fault every rank must hear of."""
    what = f"turn {turn.number} ({turn.fault} at rank {turn.faulty}): rank {me.rank}"
    silent = turn.silent and me.rank == turn.faulty
    queued: Counter[tuple[int, int]] = Counter()
    late = deadline(1.0 if silent else NOTICED_S)
    drawn = puts_of(seed, turn, me.rank)
    with contextlib.suppress(NicError):
        while port.session.failure() is None and not late():
            for each in () if silent and queued else drawn[:20]:  # its FIFO is never emptied
                queued[each.peer, each.signal] += each.value
                put(port, each)
            time.sleep(0.002)
    failure = port.session.failure()
    require(silent or isinstance(failure, NicError), f"{what} saw no error within {NOTICED_S:g} s")
    close_in_time(port.session, what)  # so that the others lose a peer
    for source, theirs in enumerate(me.exchange(queued)):
        for (peer, signal), value in theirs.items():
            seen = port.count(signal) if peer == me.rank else 0
            require(seen <= value, f"{what}: rank {source} put {value} on {signal}; it is {seen}")


def soak(me: Rank, seconds: float, seed: int, turns: int) -> dict[str, Any]:
    """Live through turns as one rank, for ``seconds`` or ``turns``; return what was counted."""
    pattern = Pattern(seed, AREA)
    counts: Counter[str] = Counter()
    start = time.monotonic()
    base: tuple[int, dict[str, int]] | None = None
    most = 0
    while me.exchange(time.monotonic() - start < seconds and counts["turns"] < turns)[0]:
        turn = Turn.draw(seed, counts["turns"])
        fault = {FAULTS: turn.fault} if turn.fault and me.rank == turn.faulty else {}
        os.environ.pop(FAULTS, None)
        os.environ.update({**turn.environment, **fault})
        settings = {"qp_timeout": 12, "retry_count": 3} if turn.breaks else {"qp_timeout": 16}
        with me.open((1 + RANKS) * AREA, **settings) as port:
            port.memory.bytes[:AREA] = pattern.bytes
            me.exchange()
            if turn.breaks:
                broken(me, port, seed, turn)
            else:
                whole(me, port, seed, turn, pattern)
        statistics = port.session.statistics()
        counts["puts"] += statistics.puts
        counts["bytes"] += statistics.put_bytes
        counts["signals"] += statistics.signals_raised
        counts["turns"] += 1
        counts[
            "turns_broken" if turn.breaks else "turns_healed" if turn.fault else "turns_calm"
        ] += 1
        del port
        if base is not None:
            most = max(most, own_bytes() - base[0])
        elif time.monotonic() - start > seconds / 10 or counts["turns"] >= turns / 3:
            base = own_bytes(), left_behind(me)
    if base is None:
        raise CheckFailed(f"not one turn within {seconds / 10:g} s; give the soak more time")
    require_nothing_more(me, base[1], f"{counts['turns']} turns")
    return {
        **counts,
        "growth_mib": round((own_bytes() - base[0]) / 2**20, 2),
        "peak_growth_mib": round(most / 2**20, 2),
    }


def soak_nics(
    nics: Sequence[str], seconds: float, seed: int, turns: int = 1 << 40, **subject: Any
) -> dict[str, Any]:
    """Soak NIC backends one after another, in ``seconds`` together or ``turns`` each. ``subject``: what
    :class:`NicSubject` takes besides. Return the figures, and what was wrong."""
    figures: dict[str, Any] = {"minutes": seconds / 60, "seed": seed}
    held: dict[str, bool] = {}
    wrong: list[str] = []
    for nic in nics:
        whole_bar = f"{nic}: nothing lost or left open, every fault an error in time"
        judged = NicSubject(nic, "soft", seed=seed, start="fork", **subject)
        try:
            ranks = judged.run(soak, RANKS, seconds / len(nics), seed, turns)
        except CheckFailed as error:
            held[whole_bar] = False
            wrong.append(f"{nic}: {error}")
            continue
        figures[nic] = ranks
        held[whole_bar] = True
        flat_bar = f"{nic}: no rank grows by more than {GROWTH_MIB:g} MiB"
        held[flat_bar] = all(rank["growth_mib"] <= GROWTH_MIB for rank in ranks)
        if not held[flat_bar]:
            wrong.append(f"{nic}: a rank grew by more than {GROWTH_MIB:g} MiB")
    return {**figures, "bars_held": held, "wrong": wrong}
