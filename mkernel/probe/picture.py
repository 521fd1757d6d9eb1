"""A machine as a picture: NUMA nodes, switches and devices, links coloured by bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from mkernel.probe.layout import Branch, Leaf, layout
from mkernel.topology.model import FABRIC_HOST, FABRIC_SWITCH, Accelerator, Node
from mkernel.user_files import save_picture

_FILLS = {"accelerator": "#dcecd9", "nic": "#dbe7f3", "down": "#f3dbdb", "bridge": "#f2f2f2"}
_UNKNOWN = "#b0b0b0"
_COLOURS = "viridis_r"
_WIDTH = 0.34
"""Inches that a device takes, which are the units along x. A level takes 1.1 inches, the units of
y."""
_LEVEL = 1.1


def write(node: Node, path: Path) -> None:
    """Draw the node; the format follows the file's suffix. NICs that do no RDMA are left out.

    ImportError: matplotlib is missing (extra ``bench``). ValueError: no such format.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # a dollar in a name is a dollar
    from matplotlib import pyplot

    picture = _Picture(node)
    figure, axes = pyplot.subplots(
        figsize=(max(6.0, picture.columns * _WIDTH + 1.5), (picture.depth + 1.5) * _LEVEL),
        constrained_layout=True,
    )
    try:
        picture.draw(figure, axes)
        save_picture(figure, path)
    finally:
        pyplot.close(figure)


class _Picture:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._tops = [
            top for top in layout(node, ethernet=False) if top.leaves or top.branches
        ] or layout(node, ethernet=False)
        self.columns = max(1, sum(_columns(top) for top in self._tops))
        self.depth = max((_depth(top) for top in self._tops), default=1)
        self._places: dict[str, tuple[float, float]] = {}
        self._links: list[tuple[tuple[float, float], tuple[float, float], float | None]] = []
        self._boxes: list[tuple[float, float, str, str, bool]] = []

    def draw(self, figure: Any, axes: Any) -> None:
        left = 0.0
        roots = []
        for top in self._tops:
            roots.append(self._place(top, left, self.depth))
            left += _columns(top)
        self._fabric()
        known = [gbs for _, _, gbs in self._links if gbs is not None]
        self._draw_links(figure, axes, known, roots)
        self._draw_boxes(axes)
        axes.set_title(self._node.hostname)
        axes.set_xlim(-1, self.columns)
        axes.set_ylim(-1.6 if self._node.fabric else -0.6, self.depth + 0.5)
        axes.axis("off")

    def _place(self, branch: Branch, left: float, level: int) -> tuple[float, float]:
        """Place a branch above the branches below it; return its position."""
        own: list[tuple[tuple[float, float], float | None]] = []
        at = left
        for leaf in branch.leaves:
            where = (at, 0.0)
            self._places[leaf.device.id] = where
            self._boxes.append((*where, leaf.device.id, _fill(leaf), True))
            own.append((where, leaf.gbs))
            at += 1
        for below in branch.branches:
            own.append((self._place(below, at, level - 1), below.gbs))
            at += _columns(below)
        here = ((left + max(at, left + 1) - 1) / 2, float(level))
        self._boxes.append((*here, branch.name, _FILLS["bridge"], False))
        self._links += [(here, where, gbs) for where, gbs in own]
        return here

    def _fabric(self) -> None:
        """Add scale-up links, which run below the devices; those to switches go to one box for all
        of them."""
        ends = {end for link in self._node.fabric for end in link.ends}
        linked = [self._places[end][0] for end in ends if end in self._places]
        for name in (FABRIC_SWITCH, FABRIC_HOST):
            if name in ends and linked:
                self._places[name] = (sum(linked) / len(linked), -1.3)
                label = "scale-up switches" if name == FABRIC_SWITCH else "CPU memory"
                self._boxes.append((*self._places[name], label, _FILLS["bridge"], False))
        self._links += [
            (self._places[link.ends[0]], self._places[link.ends[1]], link.gbs)
            for link in self._node.fabric
            if link.ends[0] in self._places and link.ends[1] in self._places
        ]

    def _draw_links(
        self, figure: Any, axes: Any, known: Sequence[float], roots: Sequence[tuple[float, float]]
    ) -> None:
        from matplotlib import cm, colormaps, colors

        scale = colors.LogNorm(min(known, default=1.0) * 0.9, max(known, default=100.0) * 1.1)
        shades = colormaps[_COLOURS]
        for (x, y), (to_x, to_y), gbs in self._links:
            colour = _UNKNOWN if gbs is None else shades(scale(gbs))
            bow = -0.25 * abs(to_x - x) if y == to_y == 0.0 else 0.0
            if bow:  # between two devices: a bow below them, or it would run through the others
                points = [step / 20 for step in range(21)]
                axes.plot(
                    [x + (to_x - x) * t for t in points],
                    [max(bow, -1.1) * 4 * t * (1 - t) - 0.1 for t in points],
                    color=colour,
                    linewidth=1.6,
                    zorder=1,
                )
            else:
                axes.plot([x, to_x], [y, to_y], color=colour, linewidth=2.0, zorder=1)
        for (x, y), (to_x, _) in pairwise(roots):
            axes.plot([x, to_x], [y, y], color=_UNKNOWN, linestyle="--", linewidth=1.5, zorder=1)
        if known:
            bar = figure.colorbar(cm.ScalarMappable(scale, shades), ax=axes, shrink=0.7, pad=0.01)
            bar.set_label("GB/s in one direction (grey: unknown)")
            ticks = sorted({round(gbs, 1) for gbs in known})
            bar.set_ticks(ticks, labels=[f"{gbs:g}" for gbs in ticks])
            bar.minorticks_off()

    def _draw_boxes(self, axes: Any) -> None:
        for x, y, label, fill, upright in self._boxes:
            axes.text(
                x,
                y,
                label,
                ha="center",
                va="center",
                rotation=90 if upright else 0,
                fontsize=7,
                zorder=2,
                bbox={"boxstyle": "round,pad=0.3", "facecolor": fill, "edgecolor": "#606060"},
            )


def _columns(branch: Branch) -> int:
    return max(1, len(branch.leaves) + sum(_columns(below) for below in branch.branches))


def _depth(branch: Branch) -> int:
    return 1 + max((_depth(below) for below in branch.branches), default=0)


def _fill(leaf: Leaf) -> str:
    if isinstance(leaf.device, Accelerator):
        return _FILLS["accelerator"]
    return _FILLS["nic" if leaf.device.active else "down"]
