"""The record of which tests of ``tests/gpu`` ran, on what, and which did not: the file that pytest
writes, and its part of the page."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from mkernel.errors import InputFileError
from mkernel.harness.results import write
from mkernel.schema_version import SchemaVersion
from mkernel.topology.model import Model, first_error

FILE = "gpu_tests.json"
FORMAT: Literal["mkernel-gpu-tests-1"] = "mkernel-gpu-tests-1"


class TestRun(Model):
    """One invocation of pytest.

    Attributes:
        selection: what it was asked for, relative to the repository's root.
        ranks_per_device: MKERNEL_RANKS_PER_DEVICE.
        counts: of tests, by outcome: passed, failed, error, skipped, xfailed, xpassed.
        skips: of tests, by reason. failures: by name, as pytest names them.
        provenance: commit, hardware, versions, as in benchmark results.
        seconds: of the whole run.
        cut_off: it has not ended, or something ended it: of some tests nothing is known.
    """

    __test__ = False  # pytest is not to collect it

    selection: tuple[str, ...]
    ranks_per_device: int = Field(ge=1)
    counts: dict[str, int]
    skips: dict[str, int] = Field(default_factory=dict)
    failures: tuple[str, ...] = ()
    provenance: dict[str, Any]
    seconds: float
    cut_off: bool = False

    def after(self, earlier: Iterable[TestRun]) -> TestRun:
        """Return this run together with the earlier one of its kind and commit that it goes on with."""
        for before in earlier:
            if (
                before.provenance["commit"] == self.provenance["commit"]
                and before.kind == self.kind
            ):
                return self.model_copy(
                    update={
                        "counts": dict(Counter(before.counts) + Counter(self.counts)),
                        "skips": dict(Counter(before.skips) + Counter(self.skips)),
                        "failures": before.failures + self.failures,
                        "seconds": round(before.seconds + self.seconds, 1),
                    }
                )
        return self

    @property
    def kind(self) -> tuple[tuple[str, ...], int, int]:
        """Its selection, ranks a device and number of GPUs; of each kind the file has one run."""
        gpus = self.provenance["hardware"].get("gpus") or ()
        return self.selection, self.ranks_per_device, len(gpus)


class TestRuns(Model):
    """All runs of a commit, one for each selection and number of ranks a device."""

    __test__ = False

    format: Annotated[Literal["mkernel-gpu-tests-1"], SchemaVersion] = FORMAT
    runs: tuple[TestRun, ...]


def add(run: TestRun, path: Path) -> None:
    """Put a run into the file, in the place of an earlier one of the same kind; runs of another commit
    leave it. Processes that add at once take turns. InputFileError."""
    with _alone_in(path.parent):
        before = read(path)
        kept = [
            each
            for each in (() if before is None else before.runs)
            if each.provenance["commit"] == run.provenance["commit"] and each.kind != run.kind
        ]
        write(TestRuns(runs=(*kept, run)), path)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read(path: Path) -> TestRuns | None:
    """None where there is no such file. InputFileError."""
    if not path.exists():
        return None
    try:
        return TestRuns.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise InputFileError(f"{path}: {first_error(error)}") from error
    except OSError as error:
        raise InputFileError(f"{path}: {error}") from error


def section(tests: TestRuns) -> list[str]:
    """Markdown."""
    lines = ["## Tests on GPUs", ""]
    for run in tests.runs:
        source = run.provenance
        hardware = source["hardware"]
        gpus = hardware.get("gpus") or ()
        on = f"{len(gpus)}x {gpus[0]}" if gpus else "no GPU"
        counts = ", ".join(f"{count} {name}" for name, count in run.counts.items())
        known = {"git": "read from git", "asserted": "asserted"}[source["commit_from"]]
        dirty = {True: "uncommitted changes", False: "no changes", None: "changes unknown"}
        lines += [
            f"`pytest {' '.join(run.selection)}`, {run.ranks_per_device} rank(s) a device, on {on}, "
            f"driver {hardware.get('driver')}, torch {source['software']['torch']}, {source['date']}, "
            f"commit `{source['commit'][:12]}` ({known}, {dirty[source['dirty']]}): **{counts}** in "
            f"{run.seconds:.0f} s{', **cut off** before its end' if run.cut_off else ''}.",
            *(f"- failed: `{name}`" for name in run.failures),
            *(f"- skipped {count}: {reason}" for reason, count in run.skips.items()),
            "",
        ]
    return lines[:-1]
