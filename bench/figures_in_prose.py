"""Figures in the project's prose, and where each comes from.

    python bench/figures_in_prose.py            # names those that differ from their source
    python bench/figures_in_prose.py --write    # and writes them into the pages

SENTENCES holds text as it stands on a page, with {} where a figure is and {...} where there are several
words, and what computes these from files under ``bench/results``, or from the model of the ascend
machine. Line breaks are free. What is said of gains comes from the newest file of its kind.
ELSEWHERE holds figures that neither has, and says whose they are. A figure is a number with a unit
or a ratio; ``tests/unit/test_figures_in_prose.py`` fails where one is in neither list.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import results_file
from results_chart import newest, results

from mkernel.backends.accelerators.ascend.machine import Machine, load_machine
from mkernel.backends.accelerators.ascend.reference import published, trace
from mkernel.backends.accelerators.ascend.timeline import model
from mkernel.harness import gains, modelled
from mkernel.harness.gains import Series

ROOT = Path(__file__).parents[1]
FIGURE = re.compile(
    r"(?<![\w.])\d+(?:[.,]\d+)*(?:\s+to\s+\d+(?:\.\d+)?)?"
    r"(?:x(?!\w)|\s?(?:%|[uμnm]?s\b|[GM]B/s|[GM]b/s|TFLOP/s|times\b))"
)


@dataclass(frozen=True)
class Sentence:
    """``figures`` returns as many strings as ``text`` has {} and {...}."""

    page: str
    text: str
    figures: Callable[[], Sequence[str]]

    def found(self, page: str) -> re.Match[str]:
        """Where the sentence stands. ValueError: nowhere, or more than once."""
        found = list(_pattern(self.text).finditer(page))
        if len(found) != 1:
            raise ValueError(f"{self.page} has this {len(found)} times, not once: {self.text}")
        return found[0]


def _pattern(text: str) -> re.Pattern[str]:
    words = r"\s+".join(re.escape(word) for word in text.split())
    several = words.replace(re.escape("{...}"), r"([^|]+?)")
    return re.compile(several.replace(re.escape("{}"), r"([^\s|]+?)"))


def result(name: str) -> Any:
    """A file of ``bench/results``."""
    return results_file.read(name)


def text(page: str) -> str:
    """A page, by its path from the root."""
    return (ROOT / page).read_text()


# What the pages say of bench/results.


def _launches_hidden(name: str) -> list[Any]:
    """Rows of a result in which what a call costs the host does not count."""
    content = result(name)
    if content["spec"]["launches"]:
        raise ValueError(f"bench/results/{name}.json counts launches")
    return [row for row in content["rows"] if row.get("mode", "kernel") == "kernel"]


def _told(one: Series) -> list[str]:
    """Its geometric mean, its least, and where it was measured."""
    where = f"`{one.file}.json`, commit {one.commit[:7]}, {one.on}"
    return [f"{gains.mean(one.ratios):.2f}", f"{min(one.ratios):.2f}", where]


def _drawn(mode: str, card: str) -> list[str]:
    """The newest draw on a card: its seed, how many rows have a ratio, and its gains."""
    one = newest("random", mode, card=card)
    rows, ratios = len(one.rows), len(one.ratios)
    count = str(rows) if rows == ratios else f"{ratios} of {rows}"
    mean, least, where = _told(one)
    return [
        one.shapes.removeprefix("drawn, "),
        count,
        mean,
        least,
        where.removesuffix(f", {one.on}"),
    ]


def _whole_layers(mode: str) -> list[str]:
    """Whole layers in a mode and direction."""
    (one,) = (one for one in results() if (one.source, one.mode) == (gains.WHOLE_LAYERS, mode))
    return _told(one)


def _tested_on() -> list[str]:
    """The most GPUs that `tests/gpu` ran on, and their card."""
    runs = [run["provenance"]["hardware"]["gpus"] for run in result("gpu_tests")["runs"]]
    most = max(runs, key=len)
    return [{1: "one", 2: "two", 4: "four", 8: "eight"}[len(most)], gains.card({"gpus": most})]


def _speed() -> Any:
    return result("ascend_speed")["figures"]


def _strict() -> list[str]:
    times = {op: each["strict_times"] for op, each in _speed()["strict"].items()}
    moe = times.pop("moe_dispatch_gemm")
    return [f"{min(times.values()):.1f}", f"{max(times.values()):.1f}", f"{moe:.1f}"]


def _simulated_product() -> list[str]:
    ratios = [each["gemm_ratio"] for each in _speed()["gemm"].values()]
    return [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]


def _model_only() -> list[str]:
    seconds = [each["model_only_cpu_s"] for each in _speed()["model_only"].values()]
    return [f"{min(seconds):.1f}", f"{max(seconds):.1f}"]


def _copy_engine() -> list[str]:
    (one,) = (
        copy["gbs"]
        for copy in result("transfer")["figures"]["copies"]
        if (copy["engine"], copy["direction"], copy["nbytes"]) == ("copy_engine", "put", 1 << 28)
    )
    return [f"{one:.0f}"]


def _product() -> list[str]:
    rows = _launches_hidden("hopper_gemm")
    ratios = [row["entries"]["mkernel"]["figures"]["to_gemm"] for row in rows]
    return [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]


def _planned(nodes: int) -> dict[str, Any]:
    figures = result("topology_scale")["figures"]
    (row,) = (row for row in figures["rows"] if row["nodes"] == nodes)
    (command,) = (row for row in figures["commands"] if row["nodes"] == nodes)
    return {**row, **command}


def _nic() -> list[str]:
    figures = result("nic")["figures"]
    return [f"{figures['put_1MiB_GBps']:.0f}", f"{figures['put_1MiB_vs_memcpy']:.2f}"]


# What docs/ascend.md says of the modelled machine.


@cache
def compared() -> modelled.ComparisonReport:
    """Published times, the published schedule under the model, and ours: ten seconds of a core."""
    return modelled.compare(load_machine())


@cache
def _before_the_fit() -> list[str]:
    """Errors of the model with the rates that were guessed by hand."""
    data = load_machine().model_dump()
    data["fabric"] |= {
        "link_gbs": 14.0, "egress_gbs": 100.0, "ingress_gbs": 100.0, "efficiency": 1.0,
    }  # fmt: skip
    data["pipes"]["mte2_gbs"] = 110.0
    guessed = Machine.model_validate(data)
    errors = []
    for row in published().rows:
        traces = [trace(row.shape, rank) for rank in range(row.ranks)]
        errors.append(model(traces, guessed, tracks=False).total_us / 1e3 / row.ms - 1)
    mean = sum(map(abs, errors)) / len(errors)
    return [f"{100 * x:.0f}" for x in (min(errors), max(errors), mean)]


def _swapped() -> list[str]:
    """The fit on the rows that check the default one."""
    found = result("ascend_fit")["swapped"]
    constants = found["constants"]
    names = ("fabric.efficiency", "chip.l2_gbs", "pipes.mte2_gbs")
    return [
        *(f"{constants[name]:g}" for name in names),
        f"{found['mean']:.1f}",
        f"{found['worst']:.1f}",
    ]


BOUNDED = (
    ("gemm", "all_gather_gemm", "6144 x 1536 x 4096"),
    ("gemm", "all_gather_gemm", "6144 x 6144 x 1536"),
    ("gemm", "gemm_reduce_scatter", "6144 x 1536 x 4096"),
    ("gemm", "gemm_reduce_scatter", "6144 x 6144 x 1536"),
    ("gemm", "gemm_all_reduce", "6144 x 1536 x 4096"),
    ("gemm", "gemm_all_reduce", "6144 x 6144 x 1536"),
    ("gemm", "gemm_all_reduce", "4096 x 4096 x 1024"),
    ("attention", "ring_attention", "16 heads, 16384 causal positions"),
    ("moe", "moe_dispatch_gemm", "8192 tokens"),
    ("moe", "moe_combine", "8192 tokens"),
)
"""Files of modelled times, their ops, and sizes as the page calls them."""


def _bounded(file: str, op: str, size: str) -> list[str]:
    """Floor, modelled time, their ratio, and what the plan predicts."""
    rows = [row for row in result(f"ascend_modelled_{file}")["rows"] if row["shape"]["op"] == op]
    (row,) = [
        row
        for row in rows
        if len(rows) == 1
        or " x ".join(str(row["shape"]["sizes"][name]) for name in ("m", "n", "k")) == size
    ]
    why = row["explained"]
    floor, took = why["floor_us"], why["use"]["pipelined_us"]
    return [f"{floor:.0f}", f"{took:.0f}", f"{took / floor:.2f}", f"{why['predicted_us']:.0f}"]


def _products_us(row: Mapping[str, Any]) -> float:
    """What the products of a modelled row take at the cube's rate."""
    floors = row["explained"]["floors"]
    return next(float(each["us"]) for each in floors if each["resource"] == "products")


def _attention() -> list[str]:
    """Modelled: the share of its bound, that of the cube's rate, and the hidden communication."""
    (row,) = result("ascend_modelled_attention")["rows"]
    took = row["explained"]["use"]["pipelined_us"]
    rate = _products_us(row) / (took - load_machine().chip.launch_us)
    return [
        f"{row['explained']['floor_us'] / took:.2f}",
        f"{rate:.2f}",
        f"{100 * row['modelled']['overlap_efficiency']:.0f}",
    ]


def _compute_alone() -> list[str]:
    """Of GEMM+ReduceScatter, modelled, as shares of the cube's rate."""
    rows = result("ascend_modelled_gemm")["rows"]
    launch_us = load_machine().chip.launch_us
    return [
        f"{_products_us(row) / (1e3 * row['modelled']['compute_only_ms'] - launch_us):.2f}"
        for row in rows
        if row["shape"]["op"] == "gemm_reduce_scatter"
    ]


def _row(number: int) -> list[str]:
    row = compared().rows[number]
    return [
        f"{row.published_ms:.3f}",
        f"{row.reference_modelled_ms:.3f}",
        f"{100 * row.error:+.1f}",
        f"{row.ours_modelled_ms:.3f}",
        f"{row.speedup:.2f}",
    ]


def _errors() -> list[str]:
    report = compared()
    checks = max(abs(row.error) for row in report.rows if not row.fitted)
    errors = (report.mean_error, report.worst_error, report.mean_error_of_checks, checks)
    return [*(f"{100 * x:.1f}" for x in errors), f"{report.geometric_mean_speedup:.2f}"]


def _two_ranks() -> list[str]:
    worst = max(abs(row.error) for row in compared().rows if row.ranks == 2)
    return [str(math.ceil(100 * worst))]


def _scaling() -> list[str]:
    """Return figures of M 8192 on 2, 4 and 8 ranks: TFLOP/s of a rank by our schedule, by the
    published one under the model, and as published; then, on 4 and 8 ranks, in ms: compute alone,
    the call, and its memory's time; and the cube's."""
    rows = [row for row in compared().rows if row.m == 8192]
    alike = [
        f"{row.tflops(getattr(row, name)):.0f}"
        for name in ("ours_modelled_ms", "reference_modelled_ms", "published_ms")
        for row in rows
    ]
    four, eight = (result(f"ascend_modelled_scaling_{ranks}")["rows"][0] for ranks in (4, 8))
    memory = [
        max(rank["memory_us"] for rank in row["explained"]["use"]["ranks"]) / 1e3
        for row in (four, eight)
    ]
    times = (
        eight["modelled"]["compute_only_ms"],
        four["modelled"]["pipelined_ms"],
        eight["modelled"]["pipelined_ms"],
        *memory,
        _products_us(eight) / 1e3,
        four["modelled"]["comm_only_ms"],
        eight["modelled"]["comm_only_ms"],
    )
    return [*alike, *(f"{ms:.2f}" for ms in times)]


def _machine(*names: str) -> Callable[[], list[str]]:
    return lambda: [f"{attrgetter(name)(load_machine()):g}" for name in names]


ASCEND = "docs/ascend.md"
SENTENCES = (
    *(
        Sentence(
            "README.md",
            f"| drawn, {{...}}, {words}, {{...}} rows | {{}}x | {{}}x | {{...}}, 2 x {card} |",
            partial(_drawn, mode, card),
        )
        for mode, words in (("graph", "CUDA graph"), ("eager", "eager loop"))
        for card in ("H100", "H200")
    ),
    *(
        Sentence(
            "README.md",
            f"| layers, {words} | {{}}x | {{}}x | {{...}} |",
            lambda mode=mode: _told(newest("layers", mode)),
        )
        for mode, words in (
            ("graph", "which constants were fitted to, CUDA graph"),
            ("eager", "eager loop"),
            ("first", "first call of a shape"),
        )
    ),
    *(
        Sentence(
            "README.md",
            f"| whole layers, {mode} | {{}}x | {{}}x | {{...}} |",
            partial(_whole_layers, mode),
        )
        for mode in ("compiled, forward", "compiled, with backward", "eager, with backward")
    ),
    Sentence("README.md", "the GEMM ops were tested on up to {} {}, the rest on two", _tested_on),
    Sentence("docs/softverbs.md", "carried at {} GB/s, {} of what memcpy reaches", _nic),
    Sentence("docs/architecture.md", "costs no SM and moves {} GB/s (256 MiB,", _copy_engine),
    Sentence("docs/architecture.md", "The product alone takes {} to {} of cuBLAS' time", _product),
    Sentence(
        "docs/architecture.md",
        "A what-if of `mkernel plan` for 1,024 nodes takes {} s of CPU that way",
        lambda: [f"{_planned(1024)['command_cpu_s']:.1f}"],
    ),
    Sentence(ASCEND, "products run at {} to {} of the speed of torch's", _simulated_product),
    Sentence(ASCEND, "takes {} to {} times as long as a functional one, and MoE {} times", _strict),
    Sentence(ASCEND, "8 ranks of 4096^3 takes {} to {} s of CPU time", _model_only),
    Sentence(
        ASCEND,
        "| cores, clock, cube: 16 x 16 x 16 multiply-adds a cycle | {}, {}, {} GHz, {} |",
        _machine("aic_cores", "aiv_cores", "clock_ghz", "cube.macs_per_cycle_16bit"),
    ),
    Sentence(
        ASCEND,
        "| a link, and a rank's egress and ingress, as they are rated | {} and {} GB/s |",
        _machine("fabric.link_gbs", "fabric.egress_gbs"),
    ),
    Sentence(ASCEND, "for the first time | {} GB/s |", _machine("chip.hbm_gbs")),
    Sentence(
        ASCEND,
        "{} bytes a cycle, whatever the instruction | {} GB/s a core |",
        lambda: [
            f"{load_machine().vector.bytes_per_cycle:g}",
            f"{load_machine().vector.bytes_per_cycle * load_machine().clock_ghz:.0f}",
        ],
    ),
    Sentence(
        ASCEND,
        "| launch {} us, memory {} us, link {} us, signal {} us, issue {} ns, a scalar load or store"
        " {} ns, NIC |",
        lambda: [
            *_machine("chip.launch_us")(),
            f"{load_machine().pipes.memory_latency_ns / 1e3:g}",
            *_machine("fabric.link_latency_us", "fabric.signal_latency_us")(),
            *_machine("pipes.issue_ns", "pipes.scalar_ns")(),
        ],
    ),
    Sentence(
        ASCEND,
        "| MTE1, FIX, MTE3 rates | {}, {}, {} GB/s |",
        _machine("pipes.mte1_gbs", "pipes.fix_gbs", "pipes.mte3_gbs"),
    ),
    Sentence(ASCEND, "that transfers get | {} |", _machine("fabric.efficiency")),
    Sentence(ASCEND, "to L1, one core | {} GB/s |", _machine("pipes.mte2_gbs")),
    Sentence(ASCEND, "loads and stores, L2 | {} GB/s |", _machine("chip.l2_gbs")),
    Sentence(
        ASCEND,
        "gives an efficiency of {}, {} GB/s of L2 and {} GB/s of MTE2, a mean error of {} % and a"
        " worst one of {} %",
        _swapped,
    ),
    Sentence(ASCEND, "the model was {} to {} % too slow, {} % in the mean", _before_the_fit),
    *(
        Sentence(
            ASCEND,
            f"| {row.ranks} | {row.m} x {row.k} x {row.n} | {'fit' if row.fitted else 'check'} |"
            " {} | {} | {} % | {} | {} |",
            lambda number=number: _row(number),
        )
        for number, row in enumerate(published().rows)
    ),
    Sentence(
        ASCEND,
        "Mean absolute error {} %, worst {} %; rows that only check: {} % and {} %. Our schedule is"
        " {}x faster than the published one",
        _errors,
    ),
    Sentence(ASCEND, "there the model is within {} %", _two_ranks),
    Sentence(
        ASCEND,
        "M 8192, K and N 4096, a rank computes at {}, {} and {} TFLOP/s on 2, 4 and 8 ranks by our"
        " schedule, at {}, {} and {} by the published one under the model, at {}, {} and {} as"
        " published. Compute alone takes {} ms, and the calls of four and eight ranks {} and {}: their"
        " memory is busy for {} and {}, the cube for {}. What travels takes {} and {} ms",
        _scaling,
    ),
    *(
        Sentence(
            ASCEND,
            f"| `{op}` | {size} |" + " {} | {} | {} | {} |",
            lambda file=file, op=op, size=size: _bounded(file, op, size),
        )
        for file, op, size in BOUNDED
    ),
    Sentence(
        ASCEND,
        "runs at {} of its bound, {} of the cube's rate; {} % of its communication is hidden",
        _attention,
    ),
    Sentence(
        ASCEND,
        "compute alone at {} of the cube's rate for 6144 x 1536 x 4096, {} for 6144 x 6144 x 1536,"
        " {} for 4096 x 4096 x 1024 and {} for 8192 x 8192 x 512",
        _compute_alone,
    ),
)

_PARTS = "the test that is named"
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(
        page.relative_to(ROOT).as_posix()
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.name != "numbers.md"
    ),
)
"""``docs/numbers.md`` is made from the files as a whole, and ``bench/hopper_notes.md`` says of itself
that its figures come from no file and are not to be quoted."""
ELSEWHERE: dict[str, tuple[tuple[str, str], ...]] = {
    "README.md": (
        (
            "1.3 % of the fastest way in the mean, more than 10 % in 16 of them, and 27 % at most",
            _PARTS,
        ),
        ("cuBLAS 1.2 times what is predicted", _PARTS),
    ),
    "docs/architecture.md": (
        ("3 % faster (`GAIN`", "the code that is named"),
        ("to 1 % (`tests/unit/plan/test_simulate.py`)", "the test that is named"),
    ),
    ASCEND: (
        ("350 to 375 TFLOP/s a chip", "public, as the table says"),
        ("7 HCCS links of 28 GB/s", "public, as the table says"),
        ("link 14, MTE2 110, egress and ingress 100 GB/s", "what _before_the_fit takes"),
        ("limits (6.5 %, 12 %, 1.15x)", "the test that is named"),
        ("within 3 % of the best of a grid", "the test that is named"),
        ("within 15 % of the replay", "the test that is named"),
        ("mean error of 5.7 %", "tried once, as the page says"),
        ("divided apart 7.4 %", "tried once, as the page says"),
        ("range a block 16.1 %", "tried once, as the page says"),
    ),
    "docs/nics.md": (
        ("tries of 4.096 us", "the InfiniBand specification's unit"),
        ("(400 Gb/s: 2 to 4)", "advice, of a link's nominal rate"),
    ),
    "docs/softverbs.md": (
        ("within 10 %", "the test that is named"),
        ("400000 is 400 Gb/s", "an example of a setting"),
        ("`cut@100+40ms`", "an example of a setting"),
    ),
    "docs/writing-a-backend.md": (("in slices of 50 ms", "mkernel/world/calls.py"),),
}
"""Of a page: text with a figure, and where that figure is from."""


def difference(sentence: Sentence, page: str) -> str | None:
    """Says what the page has and what the source has; None where it is the same."""
    stands = tuple(" ".join(each.split()) for each in sentence.found(page).groups())
    source = tuple(sentence.figures())
    if stands == source:
        return None
    return (
        f"{sentence.page} says {', '.join(stands)}; the source has {', '.join(source)}: "
        f"{sentence.text}"
    )


def written(sentence: Sentence, page: str) -> str:
    """The page with the source's figures in the sentence."""
    found = sentence.found(page)
    for group, figure in reversed(list(enumerate(sentence.figures(), 1))):
        first, last = found.span(group)
        page = page[:first] + figure + page[last:]
    return page


def without_a_source(name: str, page: str) -> Iterator[str]:
    """Figures of a page that are in neither list, and text of ELSEWHERE that is not there, or has no
    figure."""
    known = [each.found(page).span() for each in SENTENCES if each.page == name]
    for phrase, _ in ELSEWHERE.get(name, ()):
        spans = [match.span() for match in _pattern(phrase).finditer(page)]
        if not spans or not FIGURE.search(phrase):
            yield f"{name}: ELSEWHERE names text that is not there or has no figure: {phrase}"
        known += spans
    for match in FIGURE.finditer(page):
        if not any(first <= match.start() and match.end() <= last for first, last in known):
            line = page.count("\n", 0, match.start()) + 1
            yield f"{name}, line {line}: {match[0]!r} comes from no file"


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    differs = False
    for sentence in SENTENCES:
        if found := difference(sentence, text(sentence.page)):
            print(found)
            differs = True
            if given.write:
                page = written(sentence, text(sentence.page))
                (ROOT / sentence.page).write_text(page)
    return 1 if differs and not given.write else 0


if __name__ == "__main__":
    sys.exit(main())
