"""The page of measured numbers, docs/numbers.md, made from the newest result file of each kind.

    python bench/numbers_page.py            # says whether the page is not what the files say
    python bench/numbers_page.py --write    # writes it

One line for each group of results, mode and card; the site adds every table (scripts/site_hooks.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import results_file

from mkernel.harness import gains
from mkernel.harness.bench_report import SHORT
from mkernel.harness.gains import Series

RESULTS = results_file.RESULTS
PAGE = results_file.ROOT / "docs" / "numbers.md"
WORST = 12
"""The number of rows in which a peer is faster that the page lists."""

HEAD = """# Measured numbers

`make numbers` makes this page from the files of `bench/results`; do not edit it. A ratio is the time of
the fastest right peer of the same run over mkernel's: above 1, mkernel is faster. A time is the median
over turns of the slowest rank. Before every turn inputs are drawn, outputs poisoned and the L2 cache is
flushed; results are compared with float64. Peers are NCCL with cuBLAS, torch's symmetric memory, and
libraries for experts and attention; a contender that was wrong has no ratio.

Each line takes the newest file of each kind. *Mean* is the geometric mean of the rows' ratios; *ahead*
says in how many rows mkernel is at least as fast. *Held out*: the seed was used for nothing before;
*spent*: constants were fitted to its shapes or choices were made by them, as by most sizes of `targets`
and `layers`.

| results | mode | on | rows | mean | least | ahead | files of `bench/results` | commits |
|---|---|---|--:|--:|--:|--:|---|---|
"""
GROUPS = (
    "whole models", "target sizes", "drawn shapes", "layers of models, op by op", "whole layers",
    "experts", "attention", "e4m3", "few rows and other sizes",
)  # fmt: skip


def group(one: Series) -> str:
    """Return which of the groups results belong to."""
    ops = " ".join(one.ops)
    if one.source in gains.WHOLE:
        return one.source.replace("_", " ")
    if "float8" in one.inputs:
        return "e4m3"
    if "moe" in ops:
        return "experts"
    if "attention" in ops:
        return "attention"
    if one.source in gains.DRAWN:
        return "drawn shapes"
    named = {"targets": "target sizes", "layers": "layers of models, op by op"}
    return named.get(one.source, "few rows and other sizes")


def line(name: str, mode: str, on: str, found: Iterable[Series]) -> str:
    """Return one line of the table."""
    found = list(found)
    ratios = [ratio for one in found for ratio in one.ratios]
    rows = sum(len(one.rows) for one in found)
    cells = (
        name, mode, on, str(rows) if rows == len(ratios) else f"{len(ratios)} of {rows}",
        f"{gains.mean(ratios):.2f}", f"{min(ratios):.2f}",
        f"{sum(ratio >= 1 for ratio in ratios)} of {len(ratios)}",
        ", ".join(f"`{file}`" for file in dict.fromkeys(one.file for one in found)),
        ", ".join(f"`{commit}`" for commit in dict.fromkeys(one.commit[:8] for one in found)),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def page() -> str:
    """Return the page as the files are."""
    newest = [one for one in gains.newest(gains.all_series(RESULTS)) if one.ratios]
    together: dict[tuple[str, str, str], list[Series]] = {}
    for one in newest:
        name = group(one)
        if one.source in gains.DRAWN:
            name = f"{name}, {one.shapes.removeprefix('drawn, ')}"
        on = one.on if one.accelerator in ("hopper", "") else f"{one.on}, `{one.accelerator}`"
        together.setdefault((name, one.mode, on), []).append(one)
    order = sorted(together, key=lambda key: (GROUPS.index(_group_of(key[0])), key))
    lines = [line(*key, together[key]) for key in order]
    slower = [
        (row.ratio, one.file, one.mode, row)
        for one in newest
        for row in one.rows
        if row.ratio is not None and row.ratio < 1 and one.mode != "first"
    ]
    behind = sorted(slower, key=lambda each: each[:3])
    rows = sum(len(one.ratios) for one in newest if one.mode != "first")
    worst = (
        f"- {ratio:.2f}: {SHORT.get(row.op, row.op)} {row.size}, {mode} (`{file}`)"
        for ratio, file, mode, row in behind[:WORST]
    )
    lines += [
        "",
        "## Where a peer is faster",
        "",
        "The first call of a shape plans and allocates, and takes longer than any peer's. Of the other",
        f"{rows} rows a peer is faster in {len(behind)}; the {WORST} worst:",
        "",
        *worst,
        "",
        "## Every table",
        "",
        "`mkernel bench --render bench/results` prints every row with its peers, conditions and",
        "commit, the targets that are missed and the tests that ran on GPUs; `make site` puts it here.",
        "Figures that are no ratio to a peer are in files of their own: `transfer`, `hopper_gemm`,",
        "`host_time*`, `nic`, `ascend_*`, `soak*`, `chaos`, `fuzz`, `gpu_tests`; between nodes, which",
        "are emulated on one host and where no peer takes the NIC, `hopper_nodes_*` and",
        "`hopper_moe_nodes_*`.",
        "",
        "<!-- every result -->",
    ]
    return HEAD + "\n".join(lines) + "\n"


def _group_of(name: str) -> str:
    return next(each for each in GROUPS if name.startswith(each))


if __name__ == "__main__":
    sys.exit(results_file.hold(PAGE, page, __doc__ or ""))
