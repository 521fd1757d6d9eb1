"""The accelerator that the conformance kit judges, in rank processes that are kept."""

from __future__ import annotations

from typing import Any

import kept_ranks

from mkernel.conformance.accelerator import AcceleratorSubject, bounded

IN_NEW_PROCESSES = ("leaks", "two-worlds", "after-failure", "most-ranks")
"""Checks of what processes hold or go on with, and one whose world no other has."""


class Kept(AcceleratorSubject):
    """The same with rank processes that are kept, but for checks in which ranks tell how they break."""

    def launch(
        self,
        fn: Any,
        *args: Any,
        world: tuple[int, int],
        timeout_s: float | None = None,
        **told: Any,
    ) -> list[Any]:
        """As its parent's."""
        if told:
            return super().launch(fn, *args, world=world, timeout_s=timeout_s, **told)
        return kept_ranks.run(
            bounded, self.timeout_s if timeout_s is None else timeout_s, None, fn, *args,
            **self.split(world),
        )  # fmt: skip
