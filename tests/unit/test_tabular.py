"""Sheets and units: nothing is lost where a terminal is narrow, and numbers have few digits."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.text import Text

from mkernel.tabular import Column, Sheet, amount, duration, in_unit, unit_of

WHY = "because a sentence says more than a number, and takes more room"


def lines(width: int) -> list[str]:
    sheet = Sheet(
        (
            Column("op", key=True),
            Column("time", right=True, unit="ms"),
            Column("empty"),
            Column("why", prose=True),
        ),
        "a title",
    )
    sheet.row("all_gather_gemm", "1.25", "", WHY)
    sheet.row("gemm_all_reduce", Text("wrong", style="red"), "", "it is")
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(sheet)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_columns_where_there_is_room() -> None:
    title, head, _rule, first, *_ = lines(120)
    assert title == "a title"
    assert head.split() == ["op", "time,", "ms", "why"]
    assert first.split() == ["all_gather_gemm", "1.25", *WHY.split()]


def test_running_text_wraps_before_columns_go() -> None:
    text = lines(60)
    assert "time, ms" in text[1]
    assert max(map(len, text)) <= 60
    assert len(text) > 5


def test_paragraphs_where_there_is_none() -> None:
    text = lines(40)
    assert text[:3] == ["a title", "all_gather_gemm", "  time 1.25 ms"]
    assert " ".join(text[3:5]).split() == WHY.split()
    assert text[5:] == ["gemm_all_reduce", "  time wrong", "  it is"]


@pytest.mark.parametrize("width", range(48, 130))
def test_no_column_is_lost_and_no_word_cut_in_any_width(width: int) -> None:
    heads = ["M x N x K a rank", "mkernel", "gloo+matmul", "gemm", "comm", "T / best peer"]
    cells = ["256 x 128 x 192", "1.69", "2.76", "0.114", "2.83", "0.61"]
    sheet = Sheet([Column("op", key=True), *(Column(each, unit="ms") for each in heads)])
    sheet.row("gemm_rs", *cells)
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(sheet)
    shown = captured.get()
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    assert set(shown.split()) >= {"gemm_rs", *" ".join(cells).split()}, shown
    assert {each.rstrip(",") for each in shown.split()} >= set(" ".join(heads).split()), shown


def test_a_row_has_a_cell_for_each_column() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Sheet((Column("a"), Column("b"))).row("x")


@pytest.mark.parametrize(
    ("time_us", "said"),
    [
        (0, "0 us"),
        (0.25, "0.250 us"),
        (3.14159, "3.14 us"),
        (690.2, "690 us"),
        (171_999, "172 ms"),
        (1_500_000, "1.50 s"),
    ],
)
def test_durations(time_us: float, said: str) -> None:
    assert duration(time_us) == said


def test_a_column_has_one_unit() -> None:
    times = [45.0, 350.0, 1396.0]
    assert unit_of(times) == "us"
    assert [in_unit(time, "ms") for time in times] == ["0.045", "0.350", "1.40"]
    assert unit_of([]) == unit_of([0.0]) == "us"


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [(0, "0 B"), (999, "999 B"), (96_000, "96.0 kB"), (151e6, "151 MB"), (2e15, "2000 TB")],
)
def test_amounts(nbytes: float, said: str) -> None:
    assert amount(nbytes) == said
