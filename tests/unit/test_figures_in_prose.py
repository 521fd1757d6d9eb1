"""Every figure of the documentation is what its source has, and so is the chart."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from published_table import published_table

from mkernel.harness import gains

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import figures_in_prose as prose
import results_chart


@pytest.fixture(autouse=True)
def modelled_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sentences and the page's other figures take from the model is computed in one worker."""
    monkeypatch.setattr(prose, "compared", lambda: published_table(request))


@pytest.mark.parametrize("sentence", prose.SENTENCES, ids=lambda one: f"{one.page}: {one.text}")
def test_a_sentence_has_the_figures_of_its_source(sentence: prose.Sentence) -> None:
    found = prose.difference(sentence, prose.text(sentence.page))
    assert found is None, f"{found}; python bench/figures_in_prose.py --write mends it"


@pytest.mark.parametrize("page", prose.PAGES)
def test_no_figure_is_without_a_source(page: str) -> None:
    assert list(prose.without_a_source(page, prose.text(page))) == []


SENTENCE = prose.Sentence(
    "page", "it takes {took:.1f} s, {ratio} times as long", {"took": 1.54, "ratio": 2}
)


@pytest.mark.parametrize(
    "page", ["it takes 1.4 s, 2 times as long", "it takes 1.5 s, 3 times as long"]
)
def test_another_figure_is_a_difference_and_is_mended(page: str) -> None:
    found = prose.difference(SENTENCE, page)
    assert found is not None
    assert "the source has 1.5, 2" in found
    assert prose.written(SENTENCE, page) == "it takes 1.5 s, 2 times as long"


WORDS = prose.Sentence(
    "page", "| {seed!w} | {by[0]}x |", {"seed": "seed 7 (spent)", "by": ("1.31",)}
)


def test_words_may_stand_where_a_figure_may() -> None:
    assert prose.difference(WORDS, "| seed 7\n(spent) | 1.31x |") is None
    page = "| drawn | | seed 11 (held out) | 1.3x |"
    assert prose.written(WORDS, page) == "| drawn | | seed 7 (spent) | 1.31x |"


def test_lines_may_break_anywhere() -> None:
    assert prose.difference(SENTENCE, "So it takes\n1.5 s, 2\ntimes as long.") is None


@pytest.mark.parametrize(
    "page", ["", "it takes 1 s, 2 times as long, it takes 1 s, 2 times as long"]
)
def test_a_sentence_stands_once(page: str) -> None:
    with pytest.raises(ValueError, match=r"page has this [02] times, not once: it takes"):
        prose.difference(SENTENCE, page)


@pytest.mark.parametrize(
    "figure", ["0.8 of it, 12 %", "1.1 to\n1.4 times", "17.4 GB/s", "3 ms", "1.31x", "1,024 us"]
)
def test_figures_are_seen(figure: str) -> None:
    (found,) = prose.without_a_source("another page", f"one line\nand {figure} more")
    assert "line 2" in found
    assert "comes from no file" in found


@pytest.mark.parametrize(
    "text", ["4096 x 1024 x 4096", "2 x 4 ranks", "bits 30..29", "8 MiB", "TP 4"]
)
def test_sizes_are_no_figures(text: str) -> None:
    assert list(prose.without_a_source("another page", text)) == []


def test_the_chart_is_what_the_results_are() -> None:
    assert results_chart.PICTURE.read_text() == results_chart.picture(), "make numbers draws it"


def test_a_dot_lies_where_its_ratio_is() -> None:
    places = [results_chart.place(ratio) for ratio in (0.1, 0.5, 1.0, 2**0.5, 9.0)]
    assert places == sorted(places)
    assert results_chart.place(1.0) - results_chart.place(0.5) == pytest.approx(
        results_chart.place(1.4) - results_chart.place(0.7)
    )


def test_a_row_of_the_chart_needs_results() -> None:
    with pytest.raises(ValueError, match=r"has no first of any op with a peer, random, 2 ranks"):
        results_chart.newest("random", "first")


def test_what_is_beyond_the_axis_is_an_arrow_with_a_number() -> None:
    drawn = "".join(results_chart.marks(0, [0.1, 0.2, 0.5, 1.0, 2.0, 9.0]))
    assert drawn.count("<circle") == 2  # 1 and 2
    assert drawn.count("<polygon") == 1 + 2  # 0.5, and the two arrows
    assert re.findall(r">(\d+)</text>", drawn) == ["2", "1"]
    left, right = re.findall(r'font-size="11" text-anchor="(\w+)"', drawn)
    assert (left, right) == ("end", "start")


def luminance(colour: str) -> float:
    return sum(weight * int(colour[at : at + 2], 16)
               for weight, at in ((0.3, 1), (0.59, 3), (0.11, 5)))  # fmt: skip


def test_who_is_ahead_is_told_without_red_and_green() -> None:
    ahead, behind = results_chart.mark(0, 0, ahead=True), results_chart.mark(0, 0, ahead=False)
    assert ahead.split()[0] != behind.split()[0]  # a disc and a diamond
    blue = [int(colour[5:], 16) for colour in (results_chart.AHEAD, results_chart.BEHIND)]
    assert abs(blue[0] - blue[1]) > 100  # red-green blindness leaves blue
    assert abs(luminance(results_chart.AHEAD) - luminance(results_chart.BEHIND)) > 25


def test_the_chart_shows_the_newest_files_and_the_unfavourable_rows() -> None:
    shown = [line.shown for group in results_chart.groups() for line in group.lines]
    everything = results_chart.results()
    for one in shown:
        assert gains.newer(one, everything) is None, f"{one.file}, {one.mode}"
    sources = {(one.source, one.mode) for one in shown}
    assert {("layers", "eager"), ("layers", "first"), ("random", "eager")} <= sources
    whole = {one.mode for one in everything if one.source == gains.WHOLE_LAYERS}
    assert whole == {one.mode for one in shown if one.source == gains.WHOLE_LAYERS}
