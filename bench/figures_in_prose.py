"""Figures in the project's prose, and where each comes from.

    python bench/figures_in_prose.py            # names those that differ from their source
    python bench/figures_in_prose.py --write    # and writes them into the pages

TEXTS holds sentences as they stand on a page, with fields of ``str.format`` where a figure is; SOURCES
finds these in files under ``bench/results``, or in the model of the ascend machine. Line breaks are
free. What is said of gains comes from the newest file of its kind. ELSEWHERE holds figures that neither
has, and says whose they are. A figure is a number with a unit or a ratio;
``tests/unit/test_figures_in_prose.py`` fails where one is in neither list.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Formatter
from types import SimpleNamespace
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
ONE, SEVERAL = "\0", "\1"
"""Stand for one word, and for several, in a sentence of which a pattern is made."""


class Fields(Formatter):
    """Formats fields; ``!p`` gives percent, and ``!w`` says that several words stand there."""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        return 100 * value if conversion == "p" else value

    def of(self, text: str) -> Iterator[tuple[str, str, str, str | None]]:
        """Return the text before each field, the field, how it is formatted, and its conversion."""
        for before, field, spec, conversion in self.parse(text):
            yield before, field or "", spec or "", conversion


FIELDS = Fields()


@dataclass(frozen=True)
class Sentence:
    """Text as it stands on a page, with a field of :data:`SOURCES` where there is a figure."""

    page: str
    text: str
    sources: Mapping[str, Any] | None = None

    def found(self, page: str) -> re.Match[str]:
        """Return where the sentence stands. ValueError: nowhere, or more than once."""
        found = list(_pattern(self.text).finditer(page))
        if len(found) != 1:
            raise ValueError(f"{self.page} has this {len(found)} times, not once: {self.text}")
        return found[0]

    def figures(self) -> tuple[str, ...]:
        """Return what the sources have, in the order of the fields."""
        known = SOURCES if self.sources is None else self.sources
        found = []
        for _, field, spec, conversion in FIELDS.of(self.text):
            if field:
                value, _ = FIELDS.get_field(field, (), known)
                found.append(format(FIELDS.convert_field(value, conversion), spec))
        return tuple(found)


def _pattern(text: str) -> re.Pattern[str]:
    marked = "".join(
        before + ((SEVERAL if conversion == "w" else ONE) if field else "")
        for before, field, _, conversion in FIELDS.of(text)
    )
    words = r"\s+".join(re.escape(word) for word in marked.split())
    return re.compile(words.replace(SEVERAL, r"([^|]+?)").replace(ONE, r"([^\s|]+?)"))


def result(name: str) -> Any:
    """Return a file of ``bench/results``."""
    return results_file.read(name)


def text(page: str) -> str:
    """Return a page, by its path from the root."""
    return (ROOT / page).read_text()


# What the pages say of bench/results.


def _told(one: Series) -> SimpleNamespace:
    """Return its geometric mean, its least ratio, and which file has it of which commit."""
    where = f"`{one.file}.json`, commit {one.commit[:7]}"
    rows, ratios = len(one.rows), len(one.ratios)
    return SimpleNamespace(
        mean=gains.mean(one.ratios), least=min(one.ratios), where=where, on=f"{where}, {one.on}",
        shapes=one.shapes.removeprefix("drawn, "),
        rows=str(rows) if rows == ratios else f"{ratios} of {rows}",
    )  # fmt: skip


def _drawn(where: str) -> SimpleNamespace:
    mode, _, card = where.partition(" on ")
    return _told(newest("random", mode, card=card))


def _whole(mode: str) -> SimpleNamespace:
    (one,) = (one for one in results() if one.source in gains.WHOLE and one.mode == mode)
    return _told(one)


def _tested() -> SimpleNamespace:
    """Return the most GPUs that `tests/gpu` ran on, and their card."""
    runs = [run["provenance"]["hardware"]["gpus"] for run in result("gpu_tests")["runs"]]
    most = max(runs, key=len)
    count = {1: "one", 2: "two", 4: "four", 8: "eight"}[len(most)]
    return SimpleNamespace(count=count, card=gains.card({"gpus": most}))


def _speeds(part: str, figure: str) -> list[float]:
    """Return the least, the most and the last of a figure of the simulator, over all ops but MoE's, of
    which the last is."""
    found = {op: each[figure] for op, each in result("ascend_speed")["figures"][part].items()}
    moe = found.pop("moe_dispatch_gemm", math.nan)
    return [min(found.values()), max(found.values()), moe]


def _copy_engine() -> float:
    copies = result("transfer")["figures"]["copies"]
    wanted = {"engine": "copy_engine", "direction": "put", "nbytes": 1 << 28}
    (one,) = (copy["gbs"] for copy in copies if copy.items() >= wanted.items())
    return float(one)


def _product() -> list[float]:
    content = result("hopper_gemm")
    if content["spec"]["launches"]:
        raise ValueError("bench/results/hopper_gemm.json counts launches")
    rows = [row for row in content["rows"] if row.get("mode", "kernel") == "kernel"]
    ratios = [row["entries"]["mkernel"]["figures"]["to_gemm"] for row in rows]
    return [min(ratios), max(ratios)]


def _planned() -> dict[int, Any]:
    return {row["nodes"]: row for row in result("topology_scale")["figures"]["commands"]}


# What docs/ascend.md says of the modelled machine.


@cache
def compared() -> modelled.ComparisonReport:
    """Return published times, the published schedule under the model, and ours: ten seconds of a
    core."""
    return modelled.compare(load_machine())


@cache
def _before_the_fit() -> list[float]:
    """Return the least, most and mean error of the model with the rates that were guessed by hand, in
    percent."""
    data = load_machine().model_dump()
    data["fabric"] |= {
        "link_gbs": 14.0, "egress_gbs": 100.0, "ingress_gbs": 100.0, "efficiency": 1.0,
    }  # fmt: skip
    data["pipes"]["mte2_gbs"] = 110.0
    guessed = Machine.model_validate(data)
    errors = []
    for row in published().rows:
        traces = [trace(row.shape, rank) for rank in range(row.ranks)]
        errors.append(100 * (model(traces, guessed, tracks=False).total_us / 1e3 / row.ms - 1))
    return [min(errors), max(errors), sum(map(abs, errors)) / len(errors)]


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


def _bounded(number: int) -> SimpleNamespace:
    """Return floor, modelled time, their ratio, and what the plan predicts."""
    file, op, size = BOUNDED[number]
    rows = [row for row in result(f"ascend_modelled_{file}")["rows"] if row["shape"]["op"] == op]
    (row,) = [
        row
        for row in rows
        if len(rows) == 1
        or " x ".join(str(row["shape"]["sizes"][name]) for name in ("m", "n", "k")) == size
    ]
    why = row["explained"]
    floor, took = why["floor_us"], why["use"]["pipelined_us"]
    return SimpleNamespace(floor=floor, took=took, ratio=took / floor, plan=why["predicted_us"])


def _products_us(row: Mapping[str, Any]) -> float:
    """Return what the products of a modelled row take at the cube's rate."""
    floors = row["explained"]["floors"]
    return next(float(each["us"]) for each in floors if each["resource"] == "products")


def _attention() -> SimpleNamespace:
    """Return the modelled shares of its bound, of the cube's rate, and of hidden communication."""
    (row,) = result("ascend_modelled_attention")["rows"]
    took = row["explained"]["use"]["pipelined_us"]
    return SimpleNamespace(
        bound=row["explained"]["floor_us"] / took,
        rate=_products_us(row) / (took - load_machine().chip.launch_us),
        hidden=row["modelled"]["overlap_efficiency"],
    )


def _compute_alone() -> list[float]:
    """Return shares of the cube's rate that GEMM+ReduceScatter is modelled to reach."""
    launch_us = load_machine().chip.launch_us
    return [
        _products_us(row) / (1e3 * row["modelled"]["compute_only_ms"] - launch_us)
        for row in result("ascend_modelled_gemm")["rows"]
        if row["shape"]["op"] == "gemm_reduce_scatter"
    ]


def _scaling() -> SimpleNamespace:
    """Return TFLOP/s of a rank with M 8192 on 2, 4 and 8 ranks, and times of 4 and 8 ranks, in ms."""
    rows = [row for row in compared().rows if row.m == 8192]
    tflops = {
        name: [row.tflops(getattr(row, f"{name}_ms")) for row in rows]
        for name in ("ours_modelled", "reference_modelled", "published")
    }
    four, eight = (result(f"ascend_modelled_scaling_{ranks}")["rows"][0] for ranks in (4, 8))
    for row in (four, eight):
        used = row["explained"]["use"]["ranks"]
        row["modelled"]["memory_ms"] = max(rank["memory_us"] for rank in used) / 1e3
    return SimpleNamespace(
        tflops=tflops,
        four=four["modelled"],
        eight=eight["modelled"],
        cube=_products_us(eight) / 1e3,
    )


class By(dict[Any, Any]):
    """A mapping whose values a function returns when they are asked for."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, key: Any) -> Any:
        return self._function(key)


_SOURCES: dict[str, Callable[[], Any]] = {
    "drawn": lambda: By(_drawn),
    "layers": lambda: By(lambda mode: _told(newest("layers", mode))),
    "whole": lambda: By(_whole),
    "tested": _tested,
    "nic": lambda: result("nic")["figures"],
    "copy_engine": _copy_engine,
    "product": _product,
    "planned": _planned,
    "simulated": lambda: _speeds("gemm", "gemm_ratio"),
    "strict": lambda: _speeds("strict", "strict_times"),
    "model_only": lambda: _speeds("model_only", "model_only_cpu_s"),
    "machine": load_machine,
    "vector_gbs": lambda: load_machine().vector.bytes_per_cycle * load_machine().clock_ghz,
    "memory_us": lambda: load_machine().pipes.memory_latency_ns / 1e3,
    "swapped": lambda: result("ascend_fit")["swapped"],
    "before": _before_the_fit,
    "compared": lambda: compared(),  # noqa: PLW0108 - tests put another in its place
    "worst_check": lambda: max(abs(row.error) for row in compared().rows if not row.fitted),
    "two_ranks": lambda: math.ceil(
        100 * max(abs(row.error) for row in compared().rows if row.ranks == 2)
    ),
    "scaling": _scaling,
    "bounded": lambda: By(_bounded),
    "attention": _attention,
    "alone": _compute_alone,
}
SOURCES = By(lambda name: _SOURCES[name]())
"""What the fields of sentences name: a figure, or what has it, as `str.format` finds it there."""

README, ARCHITECTURE, ASCEND = "README.md", "docs/architecture.md", "docs/ascend.md"
_RATIOS = "{{{0}.mean:.2f}}x | {{{0}.least:.2f}}x"
TEXTS: dict[str, tuple[str, ...]] = {
    README: (
        *(
            f"| whole models, {label}, {{{one}.rows!w}} sizes | {_RATIOS.format(one)} | "
            f"{{{one}.on!w}} |"
            for label, one in (
                ("training step, compiled, layers", "whole[step, compiled, nn]"),
                ("training step, compiled, pass", "whole[step, compiled, pass]"),
                ("training step, CUDA graph, layers", "whole[step, graph, nn]"),
                ("prefill, compiled, layers", "whole[prefill, compiled, nn]"),
                ("prefill, compiled, pass", "whole[prefill, compiled, pass]"),
                ("prefill, CUDA graph, layers", "whole[prefill, graph, nn]"),
            )
        ),
        *(
            f"| drawn, {{{one}.shapes!w}}, {words}, {{{one}.rows!w}} rows | {_RATIOS.format(one)} | "
            f"{{{one}.where!w}}, 2 x {card} |"
            for mode, words in (("graph", "CUDA graph"), ("eager", "eager loop"))
            for card in ("H100", "H200")
            for one in (f"drawn[{mode} on {card}]",)
        ),
        *(
            f"| {label} | {_RATIOS.format(one)} | {{{one}.on!w}} |"
            for label, one in (
                ("layers, which constants were fitted to, CUDA graph", "layers[graph]"),
                ("layers, eager loop", "layers[eager]"),
                ("layers, first call of a shape", "layers[first]"),
                ("whole layers, compiled, forward", "whole[compiled, forward]"),
                ("whole layers, compiled, with backward", "whole[compiled, with backward]"),
                ("whole layers, eager, with backward", "whole[eager, with backward]"),
            )
        ),
        "the GEMM ops were tested on up to {tested.count} {tested.card}, the rest on two",
    ),
    "docs/softverbs.md": (
        "carried at {nic[put_1MiB_GBps]:.0f} GB/s, {nic[put_1MiB_vs_memcpy]:.2f} of what memcpy"
        " reaches",
    ),
    ARCHITECTURE: (
        "costs no SM and moves {copy_engine:.0f} GB/s (256 MiB,",
        "The product alone takes {product[0]:.2f} to {product[1]:.2f} of cuBLAS' time",
        "1,024 nodes take {planned[1024][command_cpu_s]:.1f} s",
    ),
    ASCEND: (
        "products run at {simulated[0]:.2f} to {simulated[1]:.2f} of the speed of torch's",
        "takes {strict[0]:.1f} to {strict[1]:.1f} times as long as a functional one, and MoE"
        " {strict[2]:.1f} times",
        "8 ranks of 4096^3 takes {model_only[0]:.1f} to {model_only[1]:.1f} s of CPU time",
        "| cores, clock, cube: 16 x 16 x 16 multiply-adds a cycle | {machine.aic_cores:g},"
        " {machine.aiv_cores:g}, {machine.clock_ghz:g} GHz, {machine.cube.macs_per_cycle_16bit:g} |",
        "| a link, and a rank's egress and ingress, as they are rated | {machine.fabric.link_gbs:g} and"
        " {machine.fabric.egress_gbs:g} GB/s |",
        "for the first time | {machine.chip.hbm_gbs:g} GB/s |",
        "{machine.vector.bytes_per_cycle:g} bytes a cycle, whatever the instruction |"
        " {vector_gbs:.0f} GB/s a core |",
        "| launch {machine.chip.launch_us:g} us, memory {memory_us:g} us, link"
        " {machine.fabric.link_latency_us:g} us, signal {machine.fabric.signal_latency_us:g} us, issue"
        " {machine.pipes.issue_ns:g} ns, a scalar load or store {machine.pipes.scalar_ns:g} ns, NIC |",
        "| MTE1, FIX, MTE3 rates | {machine.pipes.mte1_gbs:g}, {machine.pipes.fix_gbs:g},"
        " {machine.pipes.mte3_gbs:g} GB/s |",
        "that transfers get | {machine.fabric.efficiency:g} |",
        "to L1, one core | {machine.pipes.mte2_gbs:g} GB/s |",
        "loads and stores, L2 | {machine.chip.l2_gbs:g} GB/s |",
        "gives an efficiency of {swapped[constants][fabric.efficiency]:g},"
        " {swapped[constants][chip.l2_gbs]:g} GB/s of L2 and"
        " {swapped[constants][pipes.mte2_gbs]:g} GB/s of MTE2, a mean error of {swapped[mean]:.1f} %"
        " and a worst one of {swapped[worst]:.1f} %",
        "the model was {before[0]:.0f} to {before[1]:.0f} % too slow, {before[2]:.0f} % in the mean",
        *(
            f"| {row.ranks} | {row.m} x {row.k} x {row.n} | {'fit' if row.fitted else 'check'} |"
            f" {{{one}.published_ms:.3f}} | {{{one}.reference_modelled_ms:.3f}} |"
            f" {{{one}.error!p:+.1f}} % | {{{one}.ours_modelled_ms:.3f}} | {{{one}.speedup:.2f}} |"
            for number, row in enumerate(published().rows)
            for one in (f"compared.rows[{number}]",)
        ),
        "Mean absolute error {compared.mean_error!p:.1f} %, worst {compared.worst_error!p:.1f} %; rows"
        " that only check: {compared.mean_error_of_checks!p:.1f} % and {worst_check!p:.1f} %. Our"
        " schedule is {compared.geometric_mean_speedup:.2f}x faster than the published one",
        "there the model is within {two_ranks} %",
        "M 8192, K and N 4096, a rank computes at {}, {} and {} TFLOP/s on 2, 4 and 8 ranks by our"
        " schedule, at {}, {} and {} by the published one under the model, at {}, {} and {} as"
        " published. Compute alone takes {{scaling.eight[compute_only_ms]:.2f}} ms, and the calls of"
        " four and eight ranks {{scaling.four[pipelined_ms]:.2f}} and"
        " {{scaling.eight[pipelined_ms]:.2f}}: their memory is busy for"
        " {{scaling.four[memory_ms]:.2f}} and {{scaling.eight[memory_ms]:.2f}}, the cube for"
        " {{scaling.cube:.2f}}. What travels takes"
        " {{scaling.four[comm_only_ms]:.2f}} and {{scaling.eight[comm_only_ms]:.2f}} ms".format(
            *(
                f"{{scaling.tflops[{name}][{number}]:.0f}}"
                for name in ("ours_modelled", "reference_modelled", "published")
                for number in range(3)
            )
        ),
        *(
            f"| `{op}` | {size} | {{{one}.floor:.0f}} | {{{one}.took:.0f}} | {{{one}.ratio:.2f}} |"
            f" {{{one}.plan:.0f}} |"
            for number, (_, op, size) in enumerate(BOUNDED)
            for one in (f"bounded[{number}]",)
        ),
        "runs at {attention.bound:.2f} of its bound, {attention.rate:.2f} of the cube's rate;"
        " {attention.hidden!p:.0f} % of its communication is hidden",
        "compute alone at {alone[0]:.2f} of the cube's rate for 6144 x 1536 x 4096, {alone[1]:.2f} for"
        " 6144 x 6144 x 1536, {alone[2]:.2f} for 4096 x 4096 x 1024 and {alone[3]:.2f} for 8192 x 8192"
        " x 512",
    ),
}
"""Sentences with figures, by page."""
SENTENCES = tuple(Sentence(page, text) for page, texts in TEXTS.items() for text in texts)

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
    "docs/topologies.md": (
        ("8 ConnectX-7 of 400 Gb/s InfiniBand", "nominal, as the preset's file says"),
        ("32 EFA of 100 Gb/s", "nominal, as the preset's file says"),
        ("16 EFA of 200 Gb/s", "nominal, as the preset's file says"),
        ("4 EFA of 100 Gb/s", "nominal, as the preset's file says"),
        ("8 ports of 200 Gb/s for GPUDirect-TCPXO", "nominal, as the preset's file says"),
        ("63.0 GB/s upwards", "what the command prints of the example"),
        ("PCIe 31.5 GB/s", "what the command prints of the example"),
        ("400 Gb/s Ethernet · PCIe 63.0 GB/s", "what the command prints of the example"),
    ),
    "docs/writing-a-backend.md": (("in slices of 50 ms", "mkernel/world/calls.py"),),
}
"""Of a page: text with a figure, and where that figure is from."""


def difference(sentence: Sentence, page: str) -> str | None:
    """Says what the page has and what the source has; None where it is the same."""
    stands = tuple(" ".join(each.split()) for each in sentence.found(page).groups())
    source = sentence.figures()
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
