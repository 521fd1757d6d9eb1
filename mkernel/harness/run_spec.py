"""What a job is, decided and checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mkernel.cases import Case
from mkernel.harness import inputs


@dataclass(frozen=True)
class RunSpec:
    """One job; travels to the ranks.

    Attributes:
        case: the op with its sizes, dtypes and options; random inputs, fresh in every iteration.
        files: input files that replace the random data (see :func:`mkernel.harness.inputs.load`).
        output: folder for results, or None.
        warmup, iterations: untimed and timed calls of each view.
    """

    case: Case
    files: tuple[Path, ...]
    output: Path | None
    warmup: int
    iterations: int

    def opened(self) -> Case:
        """The case with the files' tensors. InputFileError, ShapeError, DtypeError."""
        if not self.files:
            return self.case
        tensors = inputs.load(self.case.op, self.files)
        return self.case.with_(options={**self.case.options, "tensors": tensors})
