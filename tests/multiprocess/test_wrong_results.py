"""`mkernel run` never says PASSED of a wrong result, nor of one that it could not judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Done, mkernel
from safetensors.torch import save_file

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("leaves_nothing")]

FAULTS = "mkernel.conformance.faults"
SHORT = ["--warmup", "0", "--iterations", "1"]
GEMM = ["--m", "256", "--n", "256", "--k", "32"]
TOKENS = ["--tokens", "128", "--features", "128", "--experts", "4", "--top-k", "2"]
SIZES = {
    "all_gather_gemm": GEMM,
    "gemm_reduce_scatter": GEMM,
    "gemm_all_reduce": GEMM,
    "all_reduce": ["--m", "192", "--n", "96"],
    "moe_dispatch_gemm": [*TOKENS, "--hidden", "24"],
    "moe_combine": TOKENS,
    "moe_gemm_combine": [*TOKENS, "--hidden", "128"],
    "ring_attention": ["--heads", "4", "--kv-heads", "2", "--sequence", "256", "--head-dim", "16"],
}


def run(op: str, accelerator: str, *arguments: str) -> Done:
    return mkernel("run", op, "--nodes", "1", "--accelerator", accelerator, *arguments)


def verdict(op: str, accelerator: str, *arguments: str) -> tuple[bool, dict[str, Any]]:
    """Whether it passed, and what the report says of ``out``."""
    done = run(op, accelerator, "--json", *arguments)
    report = json.loads(done.stdout)
    passed: bool = report["passed"]
    assert done.returncode == (0 if passed else 1), done.stderr
    return passed, report["verification"]["by_output"]["out"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return (
        torch.randn(64, 32, generator=random).half(),
        torch.randn(32, 48, generator=random).half(),
    )


@pytest.mark.parametrize(
    "fault",
    [
        "Fault",
        "LeavesRowUnwritten",
        "AddsToOutput",
        "ReturnsPrevious",
        "NarrowOutputs",
        "SwapsRanks",
    ],
)
def test_where_a_nan_row_of_b_reaches_everything_nothing_passes(file: Path, fault: str) -> None:
    """``Fault`` breaks nothing: its result cannot be judged either."""
    a, b = tensors()
    b[5] = float("nan")
    save_file({"a": a, "b": b}, file)
    done = run("gemm_ar", f"{FAULTS}:{fault}", *SHORT, "--input", str(file))
    assert done.returncode == 1, done.stderr
    said = " ".join(done.stdout.split())
    assert "FAILED out on rank 0 has" in said
    # The view before is the one that computes without communication, and writes no more than that.
    left = fault in ("LeavesRowUnwritten", "AddsToOutput", "ReturnsPrevious")
    assert ("never written" if left else "nothing that could be compared") in said


@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_all_reduce"])
def test_a_row_that_must_be_nan_must_be_written(file: Path, op: str) -> None:
    a, b = tensors()
    a[-1] = float("nan")
    save_file({"a": a, "b": b}, file)
    arguments = [*SHORT, "--input", str(file), *(["--replicate-b"] if "gather" in op else [])]
    passed, out = verdict(op, f"{FAULTS}:Fault", *arguments)
    assert passed
    assert out["elements"] == 2 * 3 * 63 * 48  # both ranks, two views and the traced call
    passed, out = verdict(op, f"{FAULTS}:LeavesRowUnwritten", *arguments)
    assert not passed
    assert out["why"] == "has 48 of 3072 elements that were never written"


@pytest.mark.parametrize("op", SIZES)
def test_an_element_that_is_left_as_it_was_is_found(op: str) -> None:
    """It is the one nearest to what was there: in results of this size an error far below the limit,
    unless poison was there."""
    assert not verdict(op, f"{FAULTS}:LeavesElement", *SHORT, *SIZES[op])[0]


@pytest.mark.parametrize("when", ["Fifth", "Sixth"], ids=["sequential", "pipelined"])
def test_every_timed_call_is_checked(when: str) -> None:
    """After three warm-up calls, one in each view, the first timed ones have epochs 4, 5 and 6."""
    right = ["--warmup", "1", "--iterations", "3", *GEMM]
    assert not verdict("gemm_ar", f"judged_backends:{when}", *right)[0]
    assert verdict("gemm_ar", f"{FAULTS}:Fault", *right)[0]


def test_the_traced_call_allocates_filled_memory() -> None:
    """It is the one call of a job whose op-allocated outputs are certain to be poisoned."""
    backend = "judged_backends:NeedsFilledMemory"
    assert verdict("ring_attention", backend, *SHORT, *SIZES["ring_attention"])[0]
