"""Statistics of a process as Prometheus' text
(https://prometheus.io/docs/instrumenting/exposition_formats/).

All numbers exist already: calls are counted by native code, bytes by plans and by the NIC's proxy. They
are read when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol

from mkernel.version import __version__
from mkernel.world.failure import failures

FAMILIES: dict[str, tuple[Literal["counter", "gauge"], str]] = {
    "info": ("gauge", "The version of mkernel; always 1."),
    "worlds": ("gauge", "Worlds that this process is in."),
    "failures_total": (
        "counter",
        "Worlds of this process that broke, by the kind of the first error of any rank.",
    ),
    "world_ranks": ("gauge", "Ranks of the world."),
    "world_nodes": ("gauge", "Nodes of the world."),
    "calls_total": (
        "counter",
        "Calls of this rank, by op, by the accelerator and path that ran them.",
    ),
    "fallback_calls_total": (
        "counter",
        "Those of them that a companion ran, since the world's accelerator does not take them.",
    ),
    "plans_total": ("counter", "Plans that this rank has made, by accelerator."),
    "new_shapes_total": ("counter", "Different calls that ranks have agreed on, by accelerator."),
    "epochs_total": ("counter", "Calls that were launched, by accelerator."),
    "errors_total": ("counter", "Calls that raised."),
    "waits_total": ("counter", "Waits of the host for a call to end."),
    "wait_seconds_total": ("counter", "How long these took."),
    "sent_bytes_total": (
        "counter",
        "Bytes to other ranks, by way: the NIC's as its proxy has carried them, others as plans say.",
    ),
    "planned_nic_bytes_total": ("counter", "Bytes to ranks of other nodes by a NIC, as plans say."),
    "memory_bytes": ("gauge", "Symmetric memory that is held, by accelerator and use."),
    "nic_puts_total": ("counter", "Puts that the NIC's proxy has posted."),
    "nic_signals_sent_total": ("counter", "Signals that it has sent."),
    "nic_signals_raised_total": ("counter", "Signals that it has raised here for other ranks."),
    "nic_stalls_total": ("counter", "Commands that it set aside because a peer's queue was full."),
    "nic_queue_depth": ("gauge", "Work requests that are under way."),
    "nic_regions": ("gauge", "Memory that is registered with the NIC, by kind."),
    "nic_lane_bytes_total": ("counter", "Bytes that were posted, by peer and by port."),
    "nic_lane_messages_total": ("counter", "Messages that were posted, by peer and by port."),
}
"""Metrics by their names without ``mkernel_``: type and help."""


class Observed(Protocol):
    """A world that tells its numbers."""

    def observe(self, page: Page) -> None: ...


class Page:
    """Samples by metric. ``common``: labels of all samples that are added."""

    def __init__(self) -> None:
        self.common: dict[str, Any] = {}
        self._samples: dict[str, list[str]] = {metric: [] for metric in FAMILIES}

    def add(self, metric: str, value: float, **labels: Any) -> None:
        """Add a sample. KeyError: there is no such metric."""
        pairs = [f'{name}="{_escaped(each)}"' for name, each in {**self.common, **labels}.items()]
        shown = f"{{{','.join(pairs)}}}" if pairs else ""
        self._samples[metric].append(f"mkernel_{metric}{shown} {value}")

    def text(self) -> str:
        """Return all metrics that have samples."""
        lines: list[str] = []
        for metric, (kind, told) in FAMILIES.items():
            if self._samples[metric]:
                lines += [f"# HELP mkernel_{metric} {told}", f"# TYPE mkernel_{metric} {kind}"]
                lines += self._samples[metric]
        return "\n".join(lines) + "\n"


def text(count: int, worlds: Iterable[Observed]) -> str:
    """Return the numbers of a process, which is in ``count`` worlds, and of these of them."""
    page = Page()
    page.add("info", 1, version=__version__)
    page.add("worlds", count)
    for kind, number in sorted(failures.items()):
        page.add("failures_total", number, error=kind)
    for world in worlds:
        world.observe(page)
    return page.text()


def _escaped(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
