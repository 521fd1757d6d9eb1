"""The launcher's side: starts ranks, names what hangs, and makes the report of what they found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mkernel.bench import figures, rank
from mkernel.bench.contenders import named
from mkernel.bench.guard import ContenderHung, Hung, Progress
from mkernel.bench.provenance import provenance
from mkernel.bench.results import Report
from mkernel.bench.spec import BenchSpec
from mkernel.bench.symm_mem import ENVIRONMENT
from mkernel.errors import ArgumentError
from mkernel.launch import host_store, launch
from mkernel.settings import load as load_settings


def run(
    spec: BenchSpec,
    *,
    ranks: int,
    accelerator: str,
    name: str = "bench",
    commit: str | None = None,
    on_row: Callable[[str], None] = lambda row: None,
) -> Report:
    """Run a benchmark on ``ranks`` processes of this machine.

    Args:
        on_row: called with each row that is done.

    Raises:
        ArgumentError: ranks would share devices.
        ContenderHung: a step outlasted its deadline; names the contender. Else what a rank raised.
    """
    shared = load_settings().ranks_per_device
    if shared > 1:
        raise ArgumentError(
            "MKERNEL_RANKS_PER_DEVICE", shared, "1 for figures: ranks take turns on a shared device"
        )

    def hear(_rank: int, payload: Any) -> None:
        if isinstance(payload, Hung):
            raise ContenderHung(
                f"{payload.step}: did not end within {payload.seconds:g} s on rank {_rank}; "
                "every rank was ended. Leave it out, or give it longer with --timeout"
            )
        if isinstance(payload, Progress):
            on_row(payload.done)

    store, port = host_store(ranks, spec.timeout_s)
    try:
        with _environment():
            results = launch(
                rank.run,
                spec,
                port,
                ranks_per_node=ranks,
                accelerator=accelerator,
                timeout_s=spec.timeout_s,
                on_report=hear,
            )
    finally:
        del store
    kinds = {each: named(each).kind for each in spec.contenders}
    found = provenance(Path.cwd(), commit)
    found["hardware"] = {**found["hardware"], **results[0].platform}
    return Report(
        name=name,
        ranks=ranks,
        accelerator=accelerator,
        spec=spec,
        provenance=found,
        clock=results[0].clock,
        rows=tuple(
            figures.row(shape, kinds, [result.rows[i] for result in results], ranks, accelerator)
            for i, shape in enumerate(spec.shapes)
        ),
    )


@contextmanager
def _environment() -> Iterator[None]:
    """Ranks inherit what keeps multicast memory off."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
