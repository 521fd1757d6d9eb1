"""Modelled time and timeline of a call, from the traces of all its ranks.

Everything here is *modelled*: the recorded schedule replayed on a machine description, never a
measurement. Times are microseconds from the launch of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mkernel.backends.accelerators.ascend.machine import Machine
from mkernel.backends.base import View

_SPAN = np.dtype(
    [
        ("rank", "<u4"),
        ("core_kind", "<u4"),
        ("core", "<u4"),
        ("kind", "u1"),
        ("pipe", "u1"),
        ("reserved", "<u2"),
        ("chunk", "<u4"),
        ("peer", "<u4"),
        ("start_ns", "<f8"),
        ("duration_ns", "<f8"),
    ]
)
# sim/trace.hpp: Kind
_TSTORE, _TMATMUL, _TMATMUL_ACC, _TPUT, _TWAIT, _NIC_PUT = 1, 3, 4, 5, 7, 8
_NO_CHUNK = 0xFFFFFFFF
_SAME_RUN_US = 2.0
"""Instructions of one chunk that are closer than this are one slice of the timeline."""

_Spans = npt.NDArray[np.void]


class Slice(NamedTuple):
    """One piece of work on a lane. ``chunk`` is -1 where the work belongs to no remote chunk."""

    name: str
    start_us: float
    duration_us: float
    chunk: int


class Lane(NamedTuple):
    """What one simulated core did: ``AIC k`` computes, ``AIV k`` communicates."""

    rank: int
    name: str
    slices: list[Slice]


@dataclass(frozen=True)
class KernelSpan:
    """When a kernel (``comm`` or ``compute``) of a rank ran."""

    rank: int
    kernel: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class ModelledRun:
    """A replayed call. ``total_us``: launch to the end of the last kernel of any rank."""

    machine: str
    view: View
    total_us: float
    kernels: tuple[KernelSpan, ...]
    lanes: tuple[Lane, ...]

    def kernel_us(self, kernel: str) -> float:
        """Longest duration of that kernel over the ranks; 0 where it did not run."""
        return max((k.end_us - k.start_us for k in self.kernels if k.kernel == kernel), default=0.0)


def model(
    traces: Sequence[bytes], machine: Machine, view: View = "pipelined", *, lanes: bool = True
) -> ModelledRun:
    """Replay the traces of all ranks of one call (any view's; ``pipelined`` is the usual one).

    ``compute_only`` ignores signals and leaves the comm kernel out; ``sequential`` starts compute
    when communication has ended on every rank. RuntimeError, naming core and signal, where a wait
    is never satisfied.
    """
    from mkernel.backends.accelerators.ascend import _ascend

    total, kernels, raw = _ascend.replay(list(traces), machine.native(), view, lanes)
    return ModelledRun(
        machine=machine.name,
        view=view,
        total_us=total / 1e3,
        kernels=tuple(
            KernelSpan(rank, name, start / 1e3, end / 1e3) for rank, name, start, end in kernels
        ),
        lanes=_lanes(np.frombuffer(raw, dtype=_SPAN)),
    )


def _lanes(spans: _Spans) -> tuple[Lane, ...]:
    order = np.lexsort((spans["start_ns"], spans["core"], spans["core_kind"], spans["rank"]))
    spans = spans[order]
    key = (
        spans["rank"].astype(np.uint64) << np.uint64(33)
        | spans["core_kind"].astype(np.uint64) << np.uint64(32)
        | spans["core"].astype(np.uint64)
    )
    edges = np.flatnonzero(np.diff(key)) + 1
    lanes = []
    for group in np.split(spans, edges):
        if not len(group):
            continue
        aiv = int(group["core_kind"][0]) == 1
        slices = _comm_slices(group) if aiv else _compute_slices(group)
        name = f"{'AIV' if aiv else 'AIC'} {int(group['core'][0])}"
        lanes.append(Lane(int(group["rank"][0]), name, slices))
    return tuple(lanes)


def _of(spans: _Spans, *kinds: int) -> _Spans:
    return spans[np.isin(spans["kind"], kinds)]


def _runs(name: str, spans: _Spans) -> list[Slice]:
    """Consecutive spans of one chunk as one slice each."""
    if not len(spans):
        return []
    start = spans["start_ns"] / 1e3
    end = start + spans["duration_ns"] / 1e3
    new = (np.diff(spans["chunk"].astype(np.int64)) != 0) | (start[1:] - end[:-1] > _SAME_RUN_US)
    first = np.concatenate(([0], np.flatnonzero(new) + 1))
    last = np.concatenate((first[1:] - 1, [len(spans) - 1]))
    return [
        Slice(name, float(start[i]), float(end[j] - start[i]), _chunk(int(spans["chunk"][i])))
        for i, j in zip(first, last, strict=True)
    ]


def _chunk(value: int) -> int:
    return -1 if value == _NO_CHUNK else value


def _waits(spans: _Spans, busy: list[Slice]) -> list[Slice]:
    """Waits for signals, less the time in which the core's other pipes still worked."""
    slices = []
    at = 0
    for span in _of(spans, _TWAIT):
        start = float(span["start_ns"]) / 1e3
        end = start + float(span["duration_ns"]) / 1e3
        while at < len(busy) and busy[at].start_us + busy[at].duration_us <= start:
            at += 1
        i = at
        while i < len(busy) and busy[i].start_us < end:
            start = max(start, busy[i].start_us + busy[i].duration_us)
            i += 1
        if end - start > 1e-3:
            slices.append(Slice("TWAIT", start, end - start, _chunk(int(span["chunk"]))))
    return slices


def _compute_slices(spans: _Spans) -> list[Slice]:
    busy = _runs("TMATMUL", _of(spans, _TMATMUL, _TMATMUL_ACC))
    busy += _runs("TSTORE", _of(spans, _TSTORE))
    busy.sort(key=lambda each: each.start_us)
    return sorted(busy + _waits(spans, busy), key=lambda each: each.start_us)


def _comm_slices(spans: _Spans) -> list[Slice]:
    busy = _runs("TPUT", _of(spans, _TPUT)) + _runs("NIC_PUT", _of(spans, _NIC_PUT))
    busy.sort(key=lambda each: each.start_us)
    return sorted(busy + _waits(spans, busy), key=lambda each: each.start_us)
