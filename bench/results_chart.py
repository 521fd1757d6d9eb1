"""The chart of the README, drawn from the newest result file of each kind: how often, and by how much,
mkernel is ahead.

    python bench/results_chart.py            # names the picture if it is not what the files say
    python bench/results_chart.py --write    # draws it

Each mark is one shape: the time of the fastest peer of the same run over mkernel's. Marks beyond the
axis are an arrow at its end with their number.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from statistics import geometric_mean
from typing import NamedTuple

import results_file

from mkernel.harness import gains
from mkernel.harness.gains import Series

PICTURE = results_file.ROOT / "docs" / "results.svg"

WIDTH, LEFT, RIGHT, ROW = 1100, 470, 920, 24
LEAST, MOST = 0.25, 3.0
AHEAD, BEHIND = "#0072B2", "#D55E00"
"""Okabe and Ito's blue and vermillion, which the colour-blind tell apart; marks differ in shape too."""
INK, DIM, LINE = "#1c2733", "#5b6776", "#d7dde4"
TICKS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)


class Line(NamedTuple):
    """One row of the chart: its label, and the results that it shows."""

    label: str
    shown: Series


class Group(NamedTuple):
    """Rows below one heading."""

    heading: str
    lines: tuple[Line, ...]


OPS = {
    "all_gather_gemm": "AllGather+GEMM",
    "gemm_reduce_scatter": "GEMM+ReduceScatter",
    "gemm_all_reduce": "GEMM+AllReduce",
}
MODES = {
    "graph": "CUDA graph",
    "eager": "eager loop",
    "kernel": "launch hidden",
    "first": "first call of a shape",
}


@cache
def results() -> tuple[Series, ...]:
    """Return all committed results, the newest first."""
    return tuple(gains.all_series(results_file.RESULTS))


def newest(
    source: str, mode: str, ranks: int = 2, card: str | None = None, op: str | None = None
) -> Series:
    """The newest results of `hopper` in bfloat16 with a peer, of one op or of all three. ValueError:
    there are none."""
    wanted = (source, mode, ranks, "hopper", "bfloat16")
    for each in results():
        if (each.source, each.mode, each.ranks, each.accelerator, each.inputs) != wanted:
            continue
        if not each.ratios or card not in (None, each.card):
            continue
        if {*OPS} <= {*each.ops} if op is None else op in each.ops:
            return each if op is None else each.of(op)
    on = f" on {card}" if card is not None else ""
    raise ValueError(
        f"bench/results has no {mode} of {op or 'any op'} with a peer, {source}, {ranks} ranks{on}"
    )


def cards(source: str, mode: str) -> list[str]:
    """The cards on which such results were measured, that of the newest first."""
    found = (each.card for each in results() if (each.source, each.mode) == (source, mode))
    return list(dict.fromkeys(found))


def groups() -> tuple[Group, ...]:
    """The rows as the files are."""
    ops = tuple(Line(words, newest("layers", "graph", op=op)) for op, words in OPS.items())
    layers = (("eager", 2), ("kernel", 2), ("kernel", 4), ("first", 2))
    drawn = [newest("random", mode, card=card)
             for mode in ("graph", "eager") for card in cards("random", mode)]  # fmt: skip
    models, whole = (
        tuple(Line(one.mode, one) for one in results() if one.source == source and one.ratios)
        for source in gains.WHOLE
    )
    return (
        *([Group("Whole Llama models of 8B and 70B width", models)] if models else []),
        Group("Layers of Llama 3, Qwen 3 and DeepSeek V3, one call in a CUDA graph", ops),
        Group(
            "The same layers, all three ops",
            tuple(Line(MODES[mode], newest("layers", mode, ranks)) for mode, ranks in layers),
        ),
        Group(
            "Drawn shapes, all three ops; spent: constants were fitted or choices made by the seed",
            tuple(
                Line(f"{MODES[one.mode]}, {one.shapes.removeprefix('drawn, ')}", one)
                for one in drawn
            ),
        ),
        Group(
            "Whole layers of Llama 3 70B, MLP and projections, beside the same of libraries",
            whole,
        ),
    )


def place(speed_up: float) -> float:
    """Return where a ratio lies on the logarithmic axis; one beyond the axis lies at its end."""
    inside = min(max(speed_up, LEAST), MOST)
    return LEFT + (RIGHT - LEFT) * math.log(inside / LEAST) / math.log(MOST / LEAST)


def text(x: float, y: float, words: str, **style: object) -> str:
    """One line of text; ``style``: attributes of SVG, with underscores for hyphens."""
    given = {"fill": INK, **style}
    attributes = " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in given.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{words}</text>'


def polygon(points: Iterable[tuple[float, float]], colour: str, opacity: float) -> str:
    """A filled one."""
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polygon points="{corners}" fill="{colour}" fill-opacity="{opacity}"/>'


def mark(x: float, y: float, ahead: bool) -> str:
    """A disc where mkernel is ahead, a diamond where a peer is."""
    if ahead:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.2" fill="{AHEAD}" fill-opacity="0.4"/>'
    corners = ((x - 5, y), (x, y - 5), (x + 5, y), (x, y + 5))
    return polygon(corners, BEHIND, 0.55)


def beyond(x: float, y: float, count: int, way: int) -> Iterator[str]:
    """An arrow out of the axis, and how many shapes it stands for; ``way``: 1 to the right, else -1."""
    colour = AHEAD if way > 0 else BEHIND
    yield polygon(((x + 3 * way, y - 6), (x + 12 * way, y), (x + 3 * way, y + 6)), colour, 1)
    anchor = "start" if way > 0 else "end"
    yield text(x + 15 * way, y + 4, str(count), fill=colour, font_size=11, text_anchor=anchor)


def marks(y: float, found: Sequence[float]) -> Iterator[str]:
    """A mark a shape, arrows for those beyond the axis, and the geometric mean."""
    for each in sorted(found):
        if LEAST <= each <= MOST:
            yield mark(place(each), y, each >= 1)
    ends = (
        (LEAST, -1, sum(each < LEAST for each in found)),
        (MOST, 1, sum(each > MOST for each in found)),
    )
    for end, way, count in ends:
        if count:
            yield from beyond(place(end), y, count, way)
    mean = geometric_mean(found)
    yield (
        f'<line x1="{place(mean):.1f}" x2="{place(mean):.1f}" y1="{y - 9:.1f}" y2="{y + 9:.1f}" '
        f'stroke="{INK}" stroke-width="2.5"/>'
    )
    yield text(RIGHT + 82, y + 4.5, f"{mean:.2f}x", font_weight="bold", text_anchor="end")
    yield text(RIGHT + 136, y + 4.5, f"{min(found):.2f}x", fill=DIM, text_anchor="end")


def picture() -> str:
    """SVG."""
    shown = groups()
    top = 62
    bottom = top + sum(34 + ROW * len(group.lines) for group in shown)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 62}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">'
    )
    lines = [head, f'<rect width="{WIDTH}" height="{bottom + 62}" fill="#ffffff"/>']
    lines.append(
        text(16, 26, "Speed-up over the fastest peer of the same run: NCCL + cuBLAS, or torch's "
             "symmetric memory", font_size=16, font_weight="bold")
    )  # fmt: skip
    lines.append(text(RIGHT + 82, 50, "mean", fill=DIM, text_anchor="end"))
    lines.append(text(RIGHT + 136, 50, "least", fill=DIM, text_anchor="end"))
    for tick in TICKS:
        x = place(tick)
        even = tick == 1
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom + 6}" '
            f'stroke="{INK if even else LINE}" stroke-width="{1.4 if even else 1}"/>'
        )
        lines.append(text(x, bottom + 24, f"{tick:g}x", fill=DIM, text_anchor="middle"))
    foot = bottom + 46
    lines.append(mark(place(1) - 16, foot - 4.5, ahead=False))
    lines.append(text(place(1) - 26, foot, "peer faster", fill=BEHIND, text_anchor="end"))
    lines.append(mark(place(1) + 16, foot - 4.5, ahead=True))
    lines.append(text(place(1) + 26, foot, "mkernel faster", fill=AHEAD))
    legend = "a mark is a shape, the bar the geometric mean"
    lines.append(text(16, foot, legend, fill=DIM, font_size=12))
    lines.append(text(RIGHT + 136, foot, "an arrow: so many beyond", fill=DIM, font_size=12,
                      text_anchor="end"))  # fmt: skip
    y = top
    for group in shown:
        y += 18
        lines.append(f'<rect x="8" y="{y - 14}" width="{WIDTH - 16}" height="20" fill="#eef2f6"/>')
        lines.append(text(16, y + 1, group.heading, fill=DIM))
        y += 16
        for label, one in group.lines:
            middle = y + ROW / 2
            where = f"{one.on}, {one.commit[:7]}, {one.date[5:]}"
            lines.append(text(16, middle + 4.5, label))
            lines.append(
                text(LEFT - 36, middle + 4, where, fill=DIM, font_size=11, text_anchor="end")
            )
            lines += marks(middle, one.ratios)
            y += ROW
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    sys.exit(results_file.hold(PICTURE, picture, __doc__ or ""))
