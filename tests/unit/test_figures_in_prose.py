"""Every figure of the documentation is what its source has, and so is the chart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from published_table import published_table

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


SENTENCE = prose.Sentence("page", "it takes {} s, {} times as long", lambda: ("1.5", "2"))


@pytest.mark.parametrize(
    "page", ["it takes 1.4 s, 2 times as long", "it takes 1.5 s, 3 times as long"]
)
def test_another_figure_is_a_difference_and_is_mended(page: str) -> None:
    found = prose.difference(SENTENCE, page)
    assert found is not None
    assert "the source has 1.5, 2" in found
    assert prose.written(SENTENCE, page) == "it takes 1.5 s, 2 times as long"


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
    with pytest.raises(ValueError, match=r"hopper_random_2\.json has no first of any op"):
        results_chart.speed_ups("hopper_random_2", "first", None)
