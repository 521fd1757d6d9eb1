"""What a job is, decided and checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mkernel.plan.model import DtypeName


@dataclass(frozen=True)
class JobSpec:
    """One job; travels to the ranks.

    Attributes:
        op: canonical name. m, n, k: C [m, n] = A [m, k] @ B [k, n] *per rank*: n is N_r.
        replicate_b: every rank uses the whole B; else rank r uses columns [r * n, (r + 1) * n).
        files: input files (one .safetensors, or .npy of a and of b); empty: random normal data,
            fresh in every iteration.
        output: folder for results, or None. seed: of the random data.
        warmup, iterations: untimed and timed calls of each view.
    """

    op: str
    m: int
    n: int
    k: int
    dtype: DtypeName
    out_dtype: DtypeName
    replicate_b: bool
    chunk: int | None
    files: tuple[Path, ...]
    output: Path | None
    seed: int
    warmup: int
    iterations: int
