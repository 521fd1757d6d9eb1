"""The calls that Python makes; native code makes those that it knows without it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from mkernel.ops.steps import Steps
from mkernel.plan.model import LaunchPlan
from mkernel.world.registry import worlds
from mkernel.world.world import World


@contextlib.contextmanager
def plans(*, of_all: bool = True) -> Iterator[list[LaunchPlan]]:
    """The plans of calls made meanwhile, in their order: of all, since native code learns none of them;
    or of those alone that it does not know."""
    found: list[LaunchPlan] = []
    run = World.run

    def noted(world: World, plan: LaunchPlan, *arguments: Any, **options: Any) -> Any:
        found.append(plan)
        return run(world, plan, *arguments, **options)

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(World, "run", noted))
        if of_all:
            for path in worlds.paths.values():
                path.forget()
            patches.enter_context(patch.object(Steps, "learn", lambda *_: None))
        yield found
