"""A benchmark's outcome as data: the JSON file, from which tables, plots and pages are made.

``Figures`` hold what was derived; ``seconds`` are the measurements behind them, which a summary leaves
out (the committed files are summaries: ``bench/results_file.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from mkernel.errors import InputFileError
from mkernel.harness.problem import Kind
from mkernel.harness.spec import BenchSpec, Mode, Shape
from mkernel.schema_version import SchemaVersion
from mkernel.topology.model import Model, first_error
from mkernel.user_files import parse_json, read_file, write_file

_FAMILY = "mkernel-bench-"
FORMAT: Literal["mkernel-bench-1"] = "mkernel-bench-1"

_MOST_FILE_BYTES = 4 << 20


Route = Literal["direct", "staged"]
"""NICs read and write accelerators' memory; or what crosses nodes rests in host memory on its way."""


class Figures(Model):
    """Derived from a contender's times and those of the parts alone. Times in microseconds, of one
    call: the median over iterations of the slowest rank.

    Attributes:
        median_us, p10_us, p90_us: over iterations.
        tflops: per rank and second.
        rho: floor / T, the roofline fraction; above 1 where the bytes move faster than in the
            collective alone that the floor was taken from.
        eta: (T_c + T_m - T) / min(T_c, T_m), the overlap efficiency.
        speedup: of this over the sequential library path.
        to_gemm: T / T_c.
    """

    median_us: float
    p10_us: float
    p90_us: float
    tflops: float | None = None
    rho: float | None = None
    eta: float | None = None
    speedup: float | None = None
    to_gemm: float | None = None


class Entry(Model):
    """One contender in one row.

    Attributes:
        kind: what it does of the op.
        seconds: the time of a call, by iteration and rank, without dropped turns; a summary has none.
        skew_us: how far apart the ranks started in each timed turn, dropped ones too; empty where that
            is not known, and in a summary.
        turns: how many turns count; None in files from before it was recorded.
        dropped: how many turns do not count, because the ranks started too far apart.
        way: which of several ways its calls take; empty: there is one.
        error: the worst rank's and turn's relative error; None: not finite, or there was none.
        figures: None unless the contender is right.
    """

    kind: Kind = "op"
    state: Literal["right", "wrong", "absent", "failed"]
    why: str = ""
    way: str = ""
    error: float | None = None
    limit: float = 0.0
    seconds: tuple[tuple[float, ...], ...] = ()
    skew_us: tuple[float, ...] = ()
    turns: int | None = None
    dropped: int = 0
    figures: Figures | None = None


class Row(Model):
    """One shape and all its contenders.

    Attributes:
        compute_us, comm_us: T_c, T_m (the faster of collective and copy engines; between nodes, where
            neither takes the NIC, the bytes by the rails' rate). floor_us: the larger of the two.
        best_peer: fastest right contender beside mkernel that does the whole op.
        to_best: mkernel's time over that peer's.
        target, target_us: the shape's, where they are meant for this world. meets_target: None without.
    """

    shape: Shape
    mode: Mode = "kernel"
    entries: dict[str, Entry]
    compute_us: float | None = None
    comm_us: float | None = None
    floor_us: float | None = None
    best_peer: str | None = None
    to_best: float | None = None
    target: float | None = None
    target_us: float | None = None
    meets_target: bool | None = None

    @property
    def wrong(self) -> list[str]:
        """Return contenders whose results were not right, or that raised."""
        return [name for name, entry in self.entries.items() if entry.state in ("wrong", "failed")]


class Timing(Model):
    """The timing of the turns of a mode.

    Attributes:
        clock: ``events``: the device's time between two events; ``host``: the host's, until the device
            has done the call.
        launches: ``hidden``: what a call costs the host is not in its time; ``counted``: it is.
        start: of the ranks. ``instant``: all at one instant of CLOCK_MONOTONIC, by their devices'
            clocks or their hosts'; ``barrier``: when they came out of one.
        most_skew_us: turns in which ranks started farther apart are dropped; None: none is.
        median_skew_us: over all timed turns of all contenders. turns, dropped: how many.
        clock_error_us: how well a device's clock is known (median over turns).
        lead_s: shortest and longest time for which a device is held before a call.
        flush_bytes, read_bytes: of the writing pass over the cache, and of the reading one after it.
    """

    clock: Literal["events", "host"]
    launches: Literal["hidden", "counted"]
    start: Literal["instant", "barrier"]
    most_skew_us: float | None = None
    median_skew_us: float | None = None
    turns: int = 0
    dropped: int = 0
    clock_error_us: float | None = None
    lead_s: tuple[float, float] | None = None
    flush_bytes: int | None = None
    read_bytes: int | None = None


class Conditions(Model):
    """The other conditions that the figures depend on.

    Attributes:
        whole: whether all rows of all calls' results were compared, as ``conditions`` says; not so in
            files from before it was recorded.
        environment: variables that the ranks were given, whatever the user's said.
        planner: where the constants come from by which the planner chooses a path; empty: there is one.
        fitted_to: shape lists that these constants were fitted to.
        spent_seeds: of drawn shapes that constants had been fitted to or choices made by when this was
            measured; empty in files from before it was recorded.
    """

    whole: bool = False
    environment: dict[str, str]
    planner: str = ""
    fitted_to: tuple[str, ...] = ()
    spent_seeds: tuple[int, ...] = ()


class Report(Model):
    """A whole run.

    Attributes:
        ranks: in all. nodes: emulated ones that they are on.
        carrier: what carries bytes between nodes, or as a process group between any ranks; empty where
            peers' memory is all that is written to.
        routes: by which bytes cross nodes by a NIC; empty on one node, and in files from before it was
            recorded.
        clock: of files from before there was ``timing``. timing: by mode.
        conditions: None in files from before it was recorded.
    """

    format: Annotated[Literal["mkernel-bench-1"], SchemaVersion] = FORMAT
    name: str
    ranks: int
    nodes: int = 1
    carrier: str = ""
    routes: tuple[Route, ...] = ()
    accelerator: str
    spec: BenchSpec
    provenance: dict[str, Any]
    clock: dict[str, Any] = Field(default_factory=dict)
    timing: dict[Mode, Timing] = Field(default_factory=dict)
    conditions: Conditions | None = None
    rows: tuple[Row, ...]

    @model_validator(mode="before")
    @classmethod
    def _with_shapes(cls, content: Any) -> Any:
        """Give a summary's spec the shapes of its rows, which are listed there alone."""
        spec = content.get("spec") if isinstance(content, dict) else None
        rows = content.get("rows") if isinstance(content, dict) else None
        if not isinstance(spec, dict) or "shapes" in spec or not isinstance(rows, list):
            return content
        shapes = [row.get("shape") for row in rows if isinstance(row, dict)]
        distinct = [each for at, each in enumerate(shapes) if each not in shapes[:at]]
        return {**content, "spec": {**spec, "shapes": distinct}}

    @property
    def passed(self) -> bool:
        """Return whether no contender was wrong, and mkernel, where it was asked for, was always
        there."""
        absent = any(
            row.entries["mkernel"].state == "absent"
            for row in self.rows
            if "mkernel" in row.entries
        )
        return not absent and not any(row.wrong for row in self.rows)


def write(report: Model, path: Path) -> None:
    """Write a report as JSON. InputFileError where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, report.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise InputFileError(f"{path}: cannot be written: {error.strerror}") from error


def read(path: Path) -> Report | None:
    """Return a report, or None where the file is some other JSON. InputFileError."""
    try:
        content = parse_json(read_file(path, "result", _MOST_FILE_BYTES))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputFileError):
            raise
        raise InputFileError(f"result {path} is not JSON: {error}") from error
    told = content.get("format") if isinstance(content, dict) else None
    if not isinstance(told, str) or not told.startswith(_FAMILY):
        return None
    try:
        return Report.model_validate(content)
    except ValidationError as error:
        raise InputFileError(f"result {path}: {first_error(error)}") from error
