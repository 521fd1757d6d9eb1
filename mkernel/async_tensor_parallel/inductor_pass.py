"""The pass that Inductor calls with each graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from mkernel.async_tensor_parallel.report import Report
from mkernel.async_tensor_parallel.rewrite import rewrite
from mkernel.world.registry import worlds

_SOURCES = tuple(str(Path(__file__).with_name(f"{name}.py")) for name in ("patterns", "rewrite"))


class FusesCollectives(CustomGraphPass):
    """A pass that runs on each graph after differentiation, after the passes that were there
    ``before``."""

    def __init__(self, report: Report, before: Any) -> None:
        self.enabled = True
        self._report = report
        self._before = before if isinstance(before, (list, tuple)) else [before] if before else []

    def __call__(self, graph: Graph) -> None:
        for each in self._before:
            each(graph)
        if self.enabled:
            rewrite(graph, self._report)

    def uuid(self) -> Any:
        """Return, for Inductor's cache, the inputs on which the rewritten code depends: the rules,
        and the existing worlds. None: an earlier pass has no such key, and nothing is cached."""
        earlier = [
            each.uuid() if isinstance(each, CustomGraphPass) else None for each in self._before
        ]
        if None in earlier:
            return None
        known = sorted((each.name, each.size, each.backends.accelerator) for each in worlds.all())
        rules = get_hash_for_files(_SOURCES, torch.__version__)
        return repr((rules, self.enabled, known, earlier)).encode()
