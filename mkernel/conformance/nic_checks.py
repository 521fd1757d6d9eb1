"""Checks of the bytes and signals that a NIC delivers.

Payloads are windows of random bytes that all ranks share, so that a put needs no copy at its source
and the receiver knows what to expect. Before a put may start, its target is poisoned: every byte
differs from what will come, and the bytes around it are guards that must stay.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from mkernel.backends.contracts.nic import NO_SIGNAL, PUT_VALUE_MAX, SELF
from mkernel.backends.transport import _transport
from mkernel.conformance.check import Check
from mkernel.errors import ArgumentError
from mkernel.harness.nic_ranks import (
    Bytes,
    NicSubject,
    Pattern,
    Port,
    Rank,
    deadline,
    poison,
    require_equal,
    within,
)
from mkernel.harness.outcome import CheckFailed, CheckSkipped

_GUARD = 4096
_STEPWISE: dict[str, Any] = {"queue_depth": 4, "fifo_slots": 4}
"""Settings with which a large put takes many steps, so that what overtakes it can be seen."""
_STRIPED: dict[str, Any] = {"qps": 4, "stripe_bytes": 1000, "receive_depth": 64}
"""Settings with which a put is spread over queue pairs, which keep no order among them."""
_GROUPED: dict[str, Any] = {"qps": 2, "stripe_bytes": 1}
"""Settings with which the smallest put is counted at the receiver."""
_KIB = 1 << 10
_MIB = 1 << 20


def _source(me: Rank, port: Port, nbytes: int) -> Pattern:
    """Fill the first ``nbytes`` of region 0 with the pattern that all ranks know."""
    pattern = Pattern(me.subject.seed, nbytes)
    port.memory.bytes[:nbytes] = pattern.bytes
    return pattern


class Landing:
    """A piece of memory that puts go to, with what it must hold in the end, guards included."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._expected = np.full(len(memory), 0xEE, dtype=np.uint8)
        memory[:] = self._expected

    def expect(self, at: int, payload: Bytes) -> None:
        """Expect ``payload`` at offset ``at``, and poison that place."""
        self._expected[at : at + len(payload)] = payload
        poison(self._memory[at : at + len(payload)], payload)

    def check(self, what: str) -> None:
        """Require that every payload is there and every other byte as it was."""
        require_equal(self._memory, self._expected, what)


# ---- visibility -----------------------------------------------------------------------------------

_SLOTS = 2
_SLOT = _MIB
_CREDIT = 64


class _Stream:
    """A stream of puts from one rank into one slot of another, one at a time; both ends know
    them."""

    def __init__(self, seed: int, source: int, target: int, slot: int) -> None:
        self._random = random.Random(f"{seed}/{source}/{target}/{slot}")
        self.source, self.target = source, target
        self.signal = source * _SLOTS + slot
        self.credit = _CREDIT + target * _SLOTS + slot
        self.count = 0
        self.draw()

    def draw(self) -> None:
        """Draw the window, place and size of the next put."""
        pick = self._random.random()
        largest = 256 if pick < 0.4 else 64 * _KIB if pick < 0.9 else _SLOT
        self.nbytes = self._random.randint(1, largest)
        self.window = self._random.randrange(2 * _SLOT - self.nbytes)
        self.place = self._random.randint(0, _SLOT - self.nbytes)

    def target_at(self) -> int:
        """Return the offset of the put in region 0 of the receiver."""
        return 2 * _SLOT + self.signal * _SLOT + self.place


def _visibility(me: Rank, puts: int, settings: dict[str, Any]) -> None:
    with me.open((2 + me.size * _SLOTS) * _SLOT, **settings) as port:
        pattern = _source(me, port, 2 * _SLOT)
        seed = me.subject.seed
        slots = [(peer, slot) for peer in me.peers for slot in range(_SLOTS)]
        sending = [_Stream(seed, me.rank, peer, slot) for peer, slot in slots]
        receiving = [_Stream(seed, peer, me.rank, slot) for peer, slot in slots]
        for stream in receiving:
            _grant(port, pattern, stream)
        late = deadline(port.timeout_s)
        while sending or receiving:
            moved = False
            for stream in [s for s in sending if port.count(s.credit) > s.count]:
                moved = True
                port.session.put(
                    stream.target, 0, stream.window, stream.target_at(), stream.nbytes,
                    stream.signal, 1,
                )  # fmt: skip
                stream.count += 1
                stream.draw()
            for stream in receiving:
                if port.count(stream.signal) > stream.count:
                    moved = True
                    _take(port, pattern, stream, puts)
            sending = [s for s in sending if s.count < puts]
            receiving = [s for s in receiving if s.count < puts]
            if moved:
                late = deadline(port.timeout_s)
            elif late():
                stuck = (receiving or sending)[0]
                raise CheckFailed(
                    f"put {stuck.count + 1} of {puts} from rank {stuck.source} to rank "
                    f"{stuck.target} did not come within {port.timeout_s:g} s{port.failed()}"
                )
            else:
                os.sched_yield()
        port.flush()


def _grant(port: Port, pattern: Pattern, stream: _Stream) -> None:
    """Poison the place of the stream's next put, then let the sender go."""
    at = stream.target_at()
    poison(port.memory.bytes[at : at + stream.nbytes], pattern.window(stream.window, stream.nbytes))
    port.session.put(stream.source, 0, 0, 0, 0, stream.credit, 1)


def _take(port: Port, pattern: Pattern, stream: _Stream, puts: int) -> None:
    """Check the stream's next put, whose signal was seen: all of it must be here, now."""
    at = stream.target_at()
    require_equal(
        port.memory.bytes[at : at + stream.nbytes],
        pattern.window(stream.window, stream.nbytes),
        f"put {stream.count + 1} of {stream.nbytes} bytes from rank {stream.source}, when its "
        "signal was seen",
    )
    if port.count(stream.signal) != stream.count + 1:
        raise CheckFailed(
            f"signal {stream.signal} is {port.count(stream.signal)} after {stream.count + 1} puts"
        )
    stream.count += 1
    stream.draw()
    if stream.count < puts:
        _grant(port, pattern, stream)


def visibility(subject: NicSubject) -> None:
    """Have three ranks put to each other; receivers look at the bytes as soon as a signal shows.

    With few work requests in flight, a put of many messages takes many steps: a signal that is not
    the last of them is seen long before the rest.
    """
    puts = subject.scale(2000, 160)
    for environment in subject.variants():
        for settings in ({}, _STEPWISE, _STRIPED):
            subject.run(_visibility, 3, puts, settings, environment=environment)


def worlds(subject: NicSubject) -> None:
    """Check visibility among two to eight processes."""
    puts = subject.scale(200, 25)
    for ranks in (8,) if subject.quick else (2, 4, 5, 8):
        subject.run(_visibility, ranks, puts, {})


# ---- sizes and alignment --------------------------------------------------------------------------


def _sizes(me: Rank, sizes: Sequence[int]) -> None:
    most = max(sizes)
    slot = most + 64 * _KIB + _GUARD
    with me.open(slot + most + 2 * _GUARD) as port:
        pattern = _source(me, port, most + 64 * _KIB)
        (peer,) = me.peers
        target = port.memory.bytes[slot - _GUARD : slot + most + _GUARD]
        target[:] = 0xEE
        me.exchange()
        for step, nbytes in enumerate(sizes, start=1):
            window = 64 * (step % 1024)
            expected = pattern.window(window, nbytes)
            poison(target[_GUARD : _GUARD + nbytes], expected)
            me.exchange()
            port.session.put(peer, 0, window, slot, nbytes, 0, 1)
            what = f"a put of {nbytes} bytes"
            port.exactly(0, step, what)
            require_equal(target[_GUARD : _GUARD + nbytes], expected, what)
            around = (target[:_GUARD], target[_GUARD + nbytes : 2 * _GUARD + nbytes])
            if any((guard != 0xEE).any() for guard in around):
                raise CheckFailed(f"{what} wrote beyond its {nbytes} bytes")
            port.flush()
            target[_GUARD : _GUARD + nbytes] = 0xEE


def sizes(subject: NicSubject) -> None:
    """Put from 0 bytes to 64 MiB, around powers of two and at odd sizes."""
    powers = [64, 4 * _KIB, 32 * _KIB, 64 * _KIB, _MIB]
    chosen = [0, 1, 2, 3, 7, 8, 1000, 1_000_003, 4 * _MIB]
    chosen += [size + more for size in powers for more in (-1, 0, 1)]
    if not subject.quick:
        chosen += [16 * _MIB - 1, 64 * _MIB]
    random.Random(subject.seed).shuffle(chosen)
    for environment in subject.variants():
        subject.run(_sizes, 2, chosen, environment=environment)


_ALIGNMENT_CELL = 2 * _GUARD + 80 * _KIB


def _alignment(me: Rank, cases: Sequence[tuple[int, int, int]]) -> None:
    source = 160 * _KIB
    with me.open(source + len(cases) * _ALIGNMENT_CELL) as port:
        pattern = _source(me, port, source)
        (peer,) = me.peers
        landing = Landing(port.memory.bytes[source:])
        for index, (nbytes, local, remote) in enumerate(cases):
            landing.expect(index * _ALIGNMENT_CELL + remote, pattern.window(local, nbytes))
        me.exchange()
        for index, (nbytes, local, remote) in enumerate(cases):
            port.session.put(
                peer, 0, local, source + index * _ALIGNMENT_CELL + remote, nbytes, 0, 1
            )
        port.exactly(0, len(cases), "puts at unaligned offsets")
        for index, (nbytes, local, remote) in enumerate(cases):
            at = source + index * _ALIGNMENT_CELL + remote
            require_equal(
                port.memory.bytes[at : at + nbytes],
                pattern.window(local, nbytes),
                f"a put of {nbytes} bytes from offset {local} to offset {at}",
            )
        landing.check("the bytes around puts at unaligned offsets")
        port.flush()


def alignment(subject: NicSubject) -> None:
    """Put from any local to any remote byte offset; guards before and after stay."""
    rng = random.Random(subject.seed)
    offsets = [1, 2, 3, 4, 5, 7, 8, 13, 31, 63, 65, 4095, 4096, 4097]
    lengths = [1, 5, 64, 1000, 4097, 70_001]
    some = subject.scale(600, 100)
    cases = [(rng.choice(lengths), rng.choice(offsets), rng.choice(offsets)) for _ in range(some)]
    for environment in subject.variants():
        subject.run(_alignment, 2, cases, environment=environment)


# ---- many puts ------------------------------------------------------------------------------------

_CELL = 320
_TURNS = 7


def _in_flight(me: Rank, puts: int, settings: dict[str, Any]) -> None:
    source = 64 * _KIB
    span = puts * _CELL

    def piece(index: int) -> tuple[int, int]:
        """Return the window and size of the put with this index."""
        return index * 7919 % (source - 256), 1 + index * 31 % 256

    with me.open(source + me.size * span, **settings) as port:
        pattern = _source(me, port, source)
        landing = Landing(port.memory.bytes[source:])
        for peer in me.peers:
            for index in range(puts):
                landing.expect(peer * span + index * _CELL, pattern.window(*piece(index)))
        me.exchange()
        for index in range(puts):
            window, nbytes = piece(index)
            for peer in me.peers:
                port.session.put(
                    peer, 0, window, source + me.rank * span + index * _CELL, nbytes,
                    me.rank * _TURNS + index % _TURNS, 1,
                )  # fmt: skip
        for peer in me.peers:
            for turn in range(_TURNS):
                port.wait(
                    peer * _TURNS + turn,
                    len(range(turn, puts, _TURNS)),
                    f"{puts} puts in flight from rank {peer}",
                )
        port.flush()
        landing.check(f"{puts} puts in flight from each peer")
        me.exchange()  # all flushed: nothing may come any more
        for peer in me.peers:
            for turn in range(_TURNS):
                port.exactly(
                    peer * _TURNS + turn,
                    len(range(turn, puts, _TURNS)),
                    f"{puts} puts in flight from rank {peer}",
                )


def in_flight(subject: NicSubject) -> None:
    """Queue far more puts than the FIFO and the queues hold; each arrives once."""
    puts = subject.scale(30_000, 2500)
    subject.run(_in_flight, 3, puts, {})
    subject.run(_in_flight, 3, puts, _STEPWISE)


def _fifo(me: Rank, puts: int, slots: int) -> None:
    span = puts * 64
    with me.open(2 * span, fifo_slots=slots) as port:
        if port.session.fifo == 0:
            raise CheckSkipped("the session's fifo is 0: it takes puts from the host only")
        pattern = _source(me, port, span)
        landing = Landing(port.memory.bytes[span:])
        landing.expect(0, pattern.bytes)
        (peer,) = me.peers
        me.exchange()
        for index in range(puts):
            command = (peer, 0, 64 * index, span + 64 * index, 64, index % 3, 2)
            pushed = _transport.fifo_push(port.session.fifo, port.pad, command, port.timeout_s)
            if pushed != _transport.WaitResult.ok:
                raise CheckFailed(f"the FIFO stayed full at command {index}: it is not drained")
        for signal in range(3):
            port.exactly(signal, 2 * len(range(signal, puts, 3)), f"{puts} commands in the FIFO")
        landing.check(f"{puts} commands in the FIFO")
        port.flush()


def fifo(subject: NicSubject) -> None:
    """Write commands as a kernel does, over many laps of a small ring and few of a large one."""
    puts = subject.scale(20_000, 1500)
    for slots in (2, 1024):
        subject.run(_fifo, 2, puts, slots)


# ---- signals --------------------------------------------------------------------------------------


def _signal_values(me: Rank, values: Sequence[int]) -> None:
    with me.open(64 * _KIB) as port:
        (peer,) = me.peers
        sums = [0, 0]
        for value in values:
            for signal, nbytes in ((0, 0), (1, 8)):
                try:
                    port.session.put(peer, 0, 0, 4096, nbytes, signal, value)
                except ArgumentError:
                    if value <= PUT_VALUE_MAX:
                        raise
                    continue
                sums[signal] += value
            if value > PUT_VALUE_MAX or value in (1, 2, 127, 128, PUT_VALUE_MAX):
                for signal in (0, 1):
                    port.exactly(signal, sums[signal], f"value {value} was added last")
                me.exchange()  # the other rank has the same sums
        for signal in (0, 1):
            port.exactly(signal, sums[signal], f"the sum of {len(values)} values")
        port.flush()


def signal_values(subject: NicSubject) -> None:
    """Put every value that must be taken, and larger ones (refused, or added whole)."""
    values = list(range(1, PUT_VALUE_MAX + 1))
    random.Random(subject.seed).shuffle(values)
    values += [PUT_VALUE_MAX + 1, 1000, 4080, 65_536, (1 << 32) - 1]
    subject.run(_signal_values, 2, values)


_EDGES = tuple((1 << bits) - 150 for bits in (8, 16, 24, 31, 32, 48, 63))
_LAST = (1 << 64) - 1 - 2 * 300


def _counter_wrap(me: Rank, many: int, settings: dict[str, Any]) -> None:
    starts = (*_EDGES, _LAST)

    def prepare(port: Port) -> None:
        for signal, start in enumerate(starts):
            if start > 0:
                _transport.pad_add(port.pad, signal, start)

    with me.open(64 * _KIB, prepare=prepare, fifo_slots=8, **settings) as port:
        (peer,) = me.peers
        me.exchange()
        for step in range(300):
            for signal in range(len(starts)):
                port.session.put(peer, 0, 0, 32 * _KIB, 8 * (step % 2), signal, 2)
        for signal, start in enumerate(starts):
            port.exactly(signal, max(start, 0) + 600, f"600 added to a counter at {start}")
        for _ in range(many):
            port.session.put(peer, 0, 0, 32 * _KIB, 2, 100, 1)
        port.exactly(100, many, f"{many} puts on one signal")
        port.flush()


def counter_wrap(subject: NicSubject) -> None:
    """Start counters just below 2^8 … 2^63 and near 2^64; then send more puts than 16 bits hold,
    whole and in parts, whose numbers wrap around too."""
    many = subject.scale(70_000, 5000)
    for settings in ({}, _GROUPED):
        subject.run(_counter_wrap, 2, many, settings)


def _order(me: Rank, rounds: int) -> None:
    with me.open(4 * _MIB, **_STEPWISE) as port:
        if not port.session.capabilities().ordered:
            raise CheckSkipped("the NIC does not claim order between puts")
        if me.rank == 0:
            _order_sender(me, port, rounds)
        else:
            _order_receiver(me, port, rounds)


def _order_sender(me: Rank, port: Port, rounds: int) -> None:
    _source(me, port, 2 * _MIB)
    for step in range(1, rounds // 10 + 1):
        port.wait(0, step, "the receiver is ready")
        port.session.put(1, 0, 0, 2 * _MIB, _MIB >> step % 5, NO_SIGNAL, 0)
        port.session.put(1, 0, 0, 0, 0, 0, 1)
    for _ in range(rounds):
        for signal in range(1, 9):
            port.session.put(1, 0, 0, 2 * _MIB, 32 * _KIB * (signal % 2), signal, 1)
    port.flush()


def _order_receiver(me: Rank, port: Port, rounds: int) -> None:
    pattern = Pattern(me.subject.seed, 2 * _MIB)
    for step in range(1, rounds // 10 + 1):
        nbytes = _MIB >> step % 5
        target = port.memory.bytes[2 * _MIB : 2 * _MIB + nbytes]
        poison(target, pattern.window(0, nbytes))
        port.session.put(0, 0, 0, 0, 0, 0, 1)
        late = deadline(port.timeout_s)
        while port.count(0) < step and not late():
            os.sched_yield()
        what = "a put without a signal, once the signal of the next put was seen"
        port.wait(0, step, what)
        require_equal(target, pattern.window(0, nbytes), what)
    late = deadline(port.timeout_s)
    counts = [0] * 9
    while counts[8] < rounds:
        for signal in range(8, 0, -1):  # the last one first: those before it can only be further
            counts[signal] = port.count(signal)
        for signal in range(1, 8):
            if counts[signal] < counts[signal + 1]:
                raise CheckFailed(
                    f"the signals of one peer came out of order: put {counts[signal + 1]} on "
                    f"signal {signal + 1} was seen before the put queued just before it"
                )
        if late():
            port.wait(8, rounds, "signals in order")
    port.flush()


def order(subject: NicSubject) -> None:
    """Check that puts of one rank show at a peer in the order in which they were queued."""
    for environment in subject.variants():
        subject.run(_order, 2, subject.scale(5000, 500), environment=environment)


def _flush(me: Rank, rounds: int) -> None:
    nbytes, parts = 256 * _KIB, 4
    with me.open(2 * parts * nbytes) as port:
        pattern = Pattern(me.subject.seed, 2 * parts * nbytes)
        staging = port.memory.bytes[: parts * nbytes]
        target = port.memory.bytes[parts * nbytes :]
        if not port.session.flush(port.timeout_s):
            raise CheckFailed("flush returned False with nothing queued")
        for step in range(1, rounds + 1):
            expected = pattern.window(step * 61, parts * nbytes)
            if me.rank == 0:
                staging[:] = expected
                me.exchange()
                for part in range(parts):
                    at = part * nbytes
                    port.session.put(1, 0, at, parts * nbytes + at, nbytes, 0, 1)
                _flush_in_slices(port)
                np.invert(expected, out=staging)
            else:
                poison(target, expected)
                me.exchange()
                port.wait(0, parts * step, "the put that was flushed")
                require_equal(target, expected, "a put whose source was overwritten after flush")
        me.exchange()


def _flush_in_slices(port: Port) -> None:
    """Flush with short deadlines, which must be kept."""
    late = deadline(port.timeout_s)
    while True:
        with within(1.0, "flush(0.05)"):
            done = port.session.flush(0.05)
        if done:
            return
        if port.session.failure() is not None or late():
            raise CheckFailed(f"flush stays False{port.failed()}")


def flush(subject: NicSubject) -> None:
    """Overwrite the source as soon as flush returns True; the receiver must not see that."""
    subject.run(_flush, 2, subject.scale(300, 20), environment=subject.slow_link(0.002))


_COMPLETION = 7
"""The signal that a sender's own completions add to."""


def _completion(me: Rank, rounds: int, settings: dict[str, Any]) -> None:
    nbytes, parts = 64 * _KIB, 4
    with me.open((1 + rounds) * parts * nbytes, **settings) as port:
        pattern = Pattern(me.subject.seed, (1 + rounds) * parts * nbytes)
        staging = port.memory.bytes[: parts * nbytes]
        arrived = port.memory.bytes[parts * nbytes :]
        me.exchange()
        for step in range(1, rounds + 1) if me.rank == 0 else ():
            staging[:] = pattern.window(step * 61, parts * nbytes)
            for part in range(parts):
                at = part * nbytes
                port.session.put(1, 0, at, step * parts * nbytes + at, nbytes, 0, 1)
            port.session.put(SELF, 0, 0, 0, 0, _COMPLETION, 3)
            port.exactly(_COMPLETION, 3 * step, "the completion of four puts")
        if me.rank == 1:
            port.wait(0, parts * rounds, "the puts before completions")
            for step in range(1, rounds + 1):
                require_equal(
                    arrived[(step - 1) * parts * nbytes :][: parts * nbytes],
                    pattern.window(step * 61, parts * nbytes),
                    "a put whose source was overwritten after its completion",
                )
        me.exchange()


def completion(subject: NicSubject) -> None:
    """Overwrite the source as soon as the completion is seen, on one queue pair and on several."""
    rounds = subject.scale(200, 20)
    for settings in ({}, _STRIPED):
        subject.run(_completion, 2, rounds, settings, environment=subject.slow_link(0.002))


DATA_CHECKS: tuple[Check, ...] = (
    Check(
        "visibility",
        "when a put's signal is seen, every byte of the put is there",
        visibility,
    ),
    Check("worlds", "so it is among eight processes that all put to each other", worlds),
    Check("sizes", "a put of any size, 0 included, writes just its bytes", sizes),
    Check("alignment", "local and remote offsets need no alignment", alignment),
    Check("in-flight", "puts beyond every queue's depth arrive, each once", in_flight),
    Check("fifo", "commands that a kernel pushes into the FIFO are carried out", fifo),
    Check("signal-values", "a put adds its whole value to its signal", signal_values),
    Check("counter-wrap", "signals are 64-bit counters, however many puts", counter_wrap),
    Check("order", "puts to one peer show in order, where the NIC claims it", order),
    Check("flush", "after flush a put's source may be overwritten", flush),
    Check(
        "completion", "after a completion the sources of puts before may be overwritten", completion
    ),
)
