"""The chart of the README, drawn from result files: how often, and by how much, mkernel is ahead.

    python bench/results_chart.py            # names the picture if it is not what the files say
    python bench/results_chart.py --write    # draws it

Each dot is one shape: the time of the fastest peer of the same run over mkernel's.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import results_file

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "results.svg"

WIDTH, LEFT, RIGHT, ROW = 860, 270, 790, 24
LEAST, MOST = 0.4, 1.8
AHEAD, BEHIND, INK, DIM, LINE = "#1f7a5c", "#c2543a", "#1c2733", "#5b6776", "#d7dde4"
TICKS = (0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8)


class Group(NamedTuple):
    """Rows below one heading. ``rows``: label, result file, mode, op (None: all three)."""

    heading: str
    rows: tuple[tuple[str, str, str, str | None], ...]


OPS = {
    "all_gather_gemm": "AllGather+GEMM",
    "gemm_reduce_scatter": "GEMM+ReduceScatter",
    "gemm_all_reduce": "GEMM+AllReduce",
}
GROUPS = (
    Group(
        "Layers of Llama 3, Qwen 3 and DeepSeek V3, one call, its launch hidden",
        tuple(
            (f"{words}, {ranks} GPUs", f"hopper_layers_{ranks}", "kernel", op)
            for op, words in OPS.items()
            for ranks in (2, 4)
        ),
    ),
    Group(
        "As a user meets it, 2 GPUs, all three ops",
        (
            ("these layers in a CUDA graph", "hopper_layers_2_loops", "graph", None),
            ("these layers in an eager loop", "hopper_layers_2_loops", "eager", None),
            ("drawn shapes in a CUDA graph, H100", "hopper_random_7_h100_2", "graph", None),
            ("drawn shapes in an eager loop, H100", "hopper_random_7_eager_h100_2", "eager", None),
        ),
    ),
)


def speed_ups(file: str, mode: str, op: str | None) -> list[float]:
    """Of each shape of a result file that has a peer."""
    rows = results_file.read(file)["rows"]
    found = [
        1 / row["to_best"]
        for row in rows
        if row.get("mode", "kernel") == mode
        and op in (None, row["shape"]["op"])
        and row["to_best"] is not None
    ]
    if not found:
        raise ValueError(f"bench/results/{file}.json has no {mode} of {op or 'any op'} with a peer")
    return found


def place(speed_up: float) -> float:
    """Where a ratio lies on the axis, which is logarithmic; what is beyond it is drawn at its end."""
    inside = min(max(speed_up, LEAST), MOST)
    return LEFT + (RIGHT - LEFT) * math.log(inside / LEAST) / math.log(MOST / LEAST)


def text(x: float, y: float, words: str, **style: object) -> str:
    """One line of text; ``style``: attributes of SVG, with underscores for hyphens."""
    given = {"fill": INK, **style}
    attributes = " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in given.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{words}</text>'


def marks(y: float, found: Sequence[float]) -> Iterator[str]:
    """A dot a shape, and the geometric mean."""
    for each in sorted(found):
        colour = AHEAD if each >= 1 else BEHIND
        yield (
            f'<circle cx="{place(each):.1f}" cy="{y:.1f}" r="4.2" fill="{colour}" '
            'fill-opacity="0.45"/>'
        )
    mean = geometric_mean(found)
    yield (
        f'<line x1="{place(mean):.1f}" x2="{place(mean):.1f}" y1="{y - 9:.1f}" y2="{y + 9:.1f}" '
        f'stroke="{INK}" stroke-width="2.5"/>'
    )
    yield text(RIGHT + 14, y + 4.5, f"{mean:.2f}x", font_weight="bold")


def picture() -> str:
    """SVG."""
    top = 62
    bottom = top + sum(34 + ROW * len(group.rows) for group in GROUPS)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 62}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14">'
    )
    lines = [head, f'<rect width="{WIDTH}" height="{bottom + 62}" fill="#ffffff"/>']
    lines.append(
        text(16, 26, "Speed-up over the faster of NCCL + cuBLAS and torch's symmetric memory, on H200",
             font_size=16, font_weight="bold")
    )  # fmt: skip
    lines.append(text(RIGHT + 14, 50, "mean", fill=DIM))
    for tick in TICKS:
        x = place(tick)
        even = tick == 1
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom + 6}" '
            f'stroke="{INK if even else LINE}" stroke-width="{1.4 if even else 1}"/>'
        )
        lines.append(text(x, bottom + 24, f"{tick:g}x", fill=DIM, text_anchor="middle"))
    lines.append(text(place(1) - 8, bottom + 46, "peer faster ←", fill=BEHIND, text_anchor="end"))
    lines.append(text(place(1) + 8, bottom + 46, "→ mkernel faster", fill=AHEAD))
    lines.append(
        text(
            16, bottom + 46, "a dot is a shape, the bar the geometric mean", fill=DIM, font_size=12
        )
    )
    y = top
    for group in GROUPS:
        y += 18
        lines.append(f'<rect x="8" y="{y - 14}" width="{WIDTH - 16}" height="20" fill="#eef2f6"/>')
        lines.append(text(16, y + 1, group.heading, fill=DIM, font_size=13))
        y += 16
        for label, file, mode, op in group.rows:
            middle = y + ROW / 2
            lines.append(text(LEFT - 14, middle + 4.5, label, text_anchor="end"))
            lines += marks(middle, speed_ups(file, mode, op))
            y += ROW
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PICTURE.write_text(picture())
    elif PICTURE.read_text() != picture():
        print(f"{PICTURE} is not what bench/results has; --write draws it")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
