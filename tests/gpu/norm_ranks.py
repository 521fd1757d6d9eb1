"""Functions that ranks run of normalised rows in e4m3, and constants that leave few rows to their
kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import calls
import torch
from calls import Tensors
from capture_ranks import captures
from hopper_ranks import Shape, Work

import mkernel
from mkernel.backends.accelerators.cuda.device_session import DeviceSession
from mkernel.backends.accelerators.cuda.machine import machine
from mkernel.backends.contracts.scaled import quantised_rows


def everywhere(file: Path) -> Path:
    """Write this machine's constants, with few rows left to their kernel wherever it takes them."""
    constants = machine().constants
    assert constants.few_rows is not None
    wherever = {"most_rows": 128, "least_columns": 1, "float8": True}
    few = constants.few_rows.model_copy(update=wherever)
    file.write_text(constants.model_copy(update={"few_rows": few}).model_dump_json())
    return file


def quantised(shapes: Sequence[Shape], turns: int) -> list[str]:
    """Failures of normalised rows in e4m3: the same as of the rows that the op gives without, by the
    first call, by those that native code starts, and replayed."""
    failures = []
    launch = DeviceSession.launch
    for shape in shapes:
        work = shape.work()
        kept: list[Tensors] = []
        with mock.patch.object(
            DeviceSession, "launch", autospec=True, side_effect=launch
        ) as python:
            for turn in range(turns):
                _fill(work, turn)
                kept.append(_in_e4m3(work))
            calls_by_python = python.call_count
            for turn, found in enumerate(kept):
                failures += _others(work, turn, found, "known")
        if calls_by_python != 1 and not shape.chunk:
            failures.append(f"{shape}: Python made {calls_by_python} calls of {turns} alike")
        failures += _replayed(work, turns)
    mkernel.synchronize()
    return failures


def _replayed(work: Work, turns: int) -> list[str]:
    found: Tensors = {}
    failures = []
    graph = captures(lambda: found.update(_in_e4m3(work)))
    for turn in range(turns):
        for each in found.values():
            calls.bits(each).fill_(0xFF)
        _fill(work, turn)
        graph.replay()
        failures += _others(work, turn, found, "replayed")
    return failures


def _fill(work: Work, turn: int) -> None:
    """Draw inputs; a row of those of a sum alone is all zeros."""
    work.fill(turn)
    if "x" in work.given and work.shape.norm == "alone":
        work.given["x"][0] = 0


def _in_e4m3(work: Work) -> Tensors:
    found = work.public(quantise="row")
    return dict(zip(("quantised", "scale", "residual_out"), found, strict=False))


def _others(work: Work, turn: int, found: Tensors, what: str) -> list[str]:
    """Return failures where a turn's results are not those of its normalised rows on the host."""
    _fill(work, turn)
    plain = work._results(work.public())
    rows, scales = quantised_rows(plain.pop("out").cpu())
    wanted = {"quantised": rows, "scale": scales, **plain}
    return [
        f"{work.shape} turn {turn}: other {name} than the host's, {what}"
        for name, right in wanted.items()
        if not torch.equal(calls.bits(found[name]).cpu(), calls.bits(right).cpu())
    ]
