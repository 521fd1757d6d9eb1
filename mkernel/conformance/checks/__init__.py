"""The accelerator checks, one concern a file. Ranks run the functions named ``rank_…``."""

from mkernel.conformance.checks import (
    attention,
    bits,
    claims,
    failures,
    lives,
    memory,
    moe,
    order,
    refusals,
    repetition,
    values,
    waiting,
)

ALL = (
    *claims.CHECKS,
    *values.CHECKS,
    *repetition.CHECKS,
    *bits.CHECKS,
    *order.CHECKS,
    *memory.CHECKS,
    *moe.CHECKS,
    *attention.CHECKS,
    *waiting.CHECKS,
    *refusals.CHECKS,
    *lives.CHECKS,
    *failures.CHECKS,
)
