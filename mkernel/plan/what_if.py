"""What machines would do that no backend runs today."""

from __future__ import annotations

from pydantic import Field

from mkernel.plan.model import CommonPart
from mkernel.plan.pipeline import Exchange


class WhatIf(CommonPart):
    """What a machine would do with a call that cannot be launched there: chips that the backend has no
    kernels for, nodes between which it has no path, an exchange or ways that it does not take.

    The functions that make plans make it too, with the same predictions. It is no plan: it has no
    schedule and no digest, no launch reads it, and ops refuse it with the sentences of ``missing``.
    """

    exchange: Exchange = Field("direct", description="between nodes, that the prediction is of")
    missing: tuple[str, ...] = Field(
        min_length=1, description="what is missing to launch it (:mod:`mkernel.plan.missing`)"
    )
