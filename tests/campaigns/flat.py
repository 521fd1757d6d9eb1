"""Rules for what a rank may hold: one each for what is counted, for memory and for epochs.

*Counted things* (descriptors, threads, shared mappings) are exact. What a life needs is there when it
is warm, which is when each of its calls was made a few times. From then on nothing of any name may be
more, when a sample gives it a while to go. One more a call, or one in all, is found by the next sample.

*Memory* is noisy, but only upwards: whatever is in use beyond what is kept goes again. It also grows at
first, ever more slowly, as stacks and buffers come to the largest that any call needs: that is what the
first third of the samples is for. So growth is the least of the last third less the least of the second
one. A spike changes neither, and what is lost by each call raises every later sample. A leak of b bytes
a call is found for certain where b times the calls of a third exceeds ``ALLOWED`` by more than memory
goes down meanwhile.

*Epochs* are exact: all ranks of a world must have made as many calls, by all three counts, in every
sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from campaigns.sample import Sample

LEAST = 9
"""Samples below which memory is not judged."""
LEAST_OF_HEAP = 30
"""The same of what malloc has given out: the tensors of a call under way are a part of it, and of few
samples all may have been taken beside a large one (25 MiB once, in a life of two seconds)."""
_MIB = 1 << 20
ALLOWED = {
    "heap": _MIB,
    "own": 4 * _MIB,
    "files": 4 * _MIB,
    "shared": _MIB,
    "device": _MIB,
    "device_process": 16 * _MIB,
    "device_used": 16 * _MIB,
}
"""Bytes that each kind of memory may grow by. ``heap`` is what malloc has given out and finds a leak;
lives of 3,700 calls on ``streams`` and of 2,600 on ``ascend`` grew it by 0.3 MiB at most. Own memory is
resident beyond that in malloc's 14 arenas, whose free blocks lie between others (0.6 MiB there). Pages
of libraries and of shared memory are resident from when they are first touched."""


CORES = {"ascend": 24 * _MIB}
"""What own memory may grow by beside that where an accelerator is simulated: each of its cores, of
which a rank has 72, has buffers of its own, whose pages are resident once a call was large enough to
touch them. That goes on, ever more slowly, for over 900 calls of twelve cases (12 MiB from the second
third of a life to the last) while ``heap`` stays what it is."""


def growth(values: Sequence[int]) -> int:
    """Return the least of the last third less the least of the second."""
    third = len(values) // 3
    return min(values[-third:]) - min(values[-2 * third : -third])


def grown(samples: Sequence[Sample]) -> dict[str, int]:
    """Return growth by kind of memory, of kinds that are in all samples; empty where there are too few
    samples to say."""
    if len(samples) < LEAST:
        return {}
    kinds = [
        kind
        for kind in samples[0].memory
        if all(kind in each.memory for each in samples)
        and (kind != "heap" or len(samples) >= LEAST_OF_HEAP)
    ]
    return {kind: growth([sample.memory[kind] for sample in samples]) for kind in kinds}


def limits(accelerator: str, beside: int = 0) -> dict[str, int]:
    """Return by how many bytes each kind of memory may grow. ``beside``: so many other soaks use the
    same devices, and what is used there in all says nothing of this one."""
    found = {**ALLOWED, "own": ALLOWED["own"] + CORES.get(accelerator, 0)}
    if beside:
        del found["device_used"]
    return found


def too_much(samples: Sequence[Sample], allowed: Mapping[str, int]) -> list[str]:
    """Report which memory of a process grew too much, in sentences. Kinds that are not in ``allowed``
    are not judged."""
    return [
        f"{kind} memory grew by {by / _MIB:.1f} MiB over {samples[-1].calls - samples[0].calls} calls "
        f"({allowed[kind] / _MIB:g} MiB may)"
        for kind, by in grown(samples).items()
        if by > allowed.get(kind, math.inf)
    ]


def piled_up(samples: Sequence[Sample]) -> list[str]:
    """Report what a later sample holds beyond the first one, which was taken when the life was warm."""
    for sample in samples[1:]:
        more = sample.held - samples[0].held
        if more:
            told = ", ".join(f"{count} more of {what}" for what, count in sorted(more.items()))
            return [f"{told} after {sample.calls} calls than after {samples[0].calls}"]
    return []


def apart(by_rank: Mapping[int, Sequence[Sample]]) -> list[str]:
    """Report where the counts of a world's calls differ, in one rank or between ranks."""
    found = []
    for number in range(min(map(len, by_rank.values()), default=0)):
        told = {rank: samples[number].worlds for rank, samples in by_rank.items()}
        for world in sorted({name for worlds in told.values() for name in worlds}):
            counts = {rank: worlds[world] for rank, worlds in told.items() if world in worlds}
            if len({count for each in counts.values() for count in each}) > 1:
                found.append(f"sample {number}: calls of world {world!r} differ: {counts}")
    return found[:1]
