"""A backend without constants: nothing is predicted, and no other chip stands in for its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import run
from plan_worlds import CAPABILITIES, explained, make
from rich.console import Console

from mkernel.backends import registry
from mkernel.cli.plan import PlanReport, command
from mkernel.errors import Unsupported
from mkernel.plan import render

CLAIMS = CAPABILITIES.model_copy(update={"constants": None})
PLUGIN = Path(__file__).parents[3] / "examples" / "plugins" / "tiny_accelerator"
TINY = ("ag_gemm", "--accelerator", "tiny_accelerator:TinyAccelerator", "--nodes", "1")


def test_everything_is_as_by_default_and_nothing_is_predicted() -> None:
    made, alternatives = explained("ag_gemm", {"m": 2048, "n": 1024, "k": 2048}, 2, 2,
                                   capabilities=CLAIMS)[:2]  # fmt: skip
    assert made.prediction is None
    assert alternatives == ()
    like = make()
    assert (made.placement, made.schedule) == (like.placement, like.schedule)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render.plan(made))
    assert "nothing: no constants" in console.export_text()


def test_constants_that_the_user_gives_count() -> None:
    assert make(capabilities=CLAIMS, constants=CAPABILITIES.constants) == make()


@pytest.mark.parametrize(("top_k", "returns"), [(4, "ranks"), (3, "slots")])
def test_results_come_home_by_rank_where_that_is_less_than_half(top_k: int, returns: str) -> None:
    """A token has slots of the other of two ranks but once in 2^top_k times: 15/16 or 7/8 of a row
    travels, and by slot half of all: 2 rows or 3/2."""
    sizes = {"tokens": 64, "hidden": 64, "features": 64, "experts": 8, "top_k": top_k}
    claims = CLAIMS.model_copy(update={"ops": ("moe_gemm_combine",)})
    made = explained("moe_gemm_combine", sizes, 1, 2, capabilities=claims)
    assert made.pipeline.returns == returns


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.delenv("MKERNEL_CONSTANTS", raising=False)


@pytest.mark.usefixtures("tiny")
def test_a_plug_in_may_bring_none() -> None:
    report = PlanReport.model_validate_json(run(command, *TINY, "--json"))
    assert report.plan is not None
    assert report.plan.prediction is None
    with pytest.raises(Unsupported, match=r"brings no constants of these chips.*--constants FILE"):
        run(command, *TINY, "--simulate")
    assert registry.accelerator(TINY[2]).machine_file is None
