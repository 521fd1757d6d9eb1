"""Modelled time and timeline of a call, from the traces of all its ranks.

Everything here is *modelled*: the recorded schedule replayed on a machine description, never a
measurement. Times are microseconds from the launch of the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mkernel.backends.accelerators.ascend.machine import Machine
from mkernel.backends.base import KernelSpan, Lane, ModelledRun, Span, View

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
        name = f"{'AIV' if aiv else 'AIC'} {int(group['core'][0])}"
        busy = _comm_spans(group) if aiv else _compute_spans(group)
        lanes.append(Lane(int(group["rank"][0]), name, "comm" if aiv else "compute", busy))
    return tuple(lanes)


def _of(spans: _Spans, *kinds: int) -> _Spans:
    return spans[np.isin(spans["kind"], kinds)]


def _runs(name: str, spans: _Spans) -> list[Span]:
    """Consecutive spans of one chunk as one slice each."""
    if not len(spans):
        return []
    start = spans["start_ns"] / 1e3
    end = start + spans["duration_ns"] / 1e3
    new = (np.diff(spans["chunk"].astype(np.int64)) != 0) | (start[1:] - end[:-1] > _SAME_RUN_US)
    first = np.concatenate(([0], np.flatnonzero(new) + 1))
    last = np.concatenate((first[1:] - 1, [len(spans) - 1]))
    return [
        Span(name, float(start[i]), float(end[j] - start[i]), _chunk(int(spans["chunk"][i])))
        for i, j in zip(first, last, strict=True)
    ]


def _chunk(value: int) -> int | None:
    return None if value == _NO_CHUNK else value


def _waits(spans: _Spans, busy: list[Span]) -> list[Span]:
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
            slices.append(Span("TWAIT", start, end - start, _chunk(int(span["chunk"]))))
    return slices


def _compute_spans(spans: _Spans) -> list[Span]:
    busy = _runs("TMATMUL", _of(spans, _TMATMUL, _TMATMUL_ACC))
    busy += _runs("TSTORE", _of(spans, _TSTORE))
    busy.sort(key=lambda each: each.start_us)
    return sorted(busy + _waits(spans, busy), key=lambda each: each.start_us)


def _comm_spans(spans: _Spans) -> list[Span]:
    busy = _runs("TPUT", _of(spans, _TPUT)) + _runs("NIC_PUT", _of(spans, _NIC_PUT))
    busy.sort(key=lambda each: each.start_us)
    return sorted(busy + _waits(spans, busy), key=lambda each: each.start_us)
